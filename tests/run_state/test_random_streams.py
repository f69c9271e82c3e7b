"""``lagom.run_state.random_streams``: common and own streams."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lagom.run_state.random_streams import OwnStreams, derive_seed, seed_everything


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.randn())


def test_seeding_is_what_a_program_does_by_hand() -> None:
    seed_everything(7)
    found = draw()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    assert found == draw()


def test_the_common_streams_go_on_as_if_nothing_was_drawn() -> None:
    seed_everything(0)
    expected = [draw() for _ in range(4)]
    seed_everything(0)
    held: Any = np.random.mtrand._rand
    streams = OwnStreams(1, 0, torch.device("cpu"))
    found, own = [], []
    for _ in range(2):
        # An odd number of normal numbers: numpy keeps the second of a pair.
        found.append(draw())
        with streams.in_fetch():
            own += [draw(), draw(), draw()]
    found += [draw(), draw()]
    assert found == expected
    assert np.random.mtrand._rand is held
    assert len(set(own) | set(found)) == 10


def test_streams_are_put_back_after_an_exception() -> None:
    seed_everything(0)
    expected = draw()
    seed_everything(0)

    def fail() -> None:
        with OwnStreams(1, 0, torch.device("cpu")).in_fetch():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_derived_seeds_are_fixed_and_differ() -> None:
    assert derive_seed("a", 0) == derive_seed("a", 0) != derive_seed("a", 1)
    assert 0 <= derive_seed("a") < 2**63
    torch.manual_seed(derive_seed("a"))


def test_without_a_seed_own_streams_follow_the_common_one_and_differ_between_ranks() -> None:
    def draws(seed: int, rank: int) -> float:
        torch.manual_seed(seed)
        with OwnStreams(None, rank, torch.device("cpu")).in_forward():
            return torch.rand(()).item()

    drawn = [draws(1, 0), draws(2, 0), draws(1, 1), draws(1, 0)]
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]
