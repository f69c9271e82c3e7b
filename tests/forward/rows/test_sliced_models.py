"""Models and loops of many kinds under ``batches="whole"``: losses, weights and buffers equal those of a plain run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from lagom.forward.rows import whole_batch
from lagom.session.session import Session
from tests.programs.judge import differences
from tests.ranks import alone, run_ranks
from tests.session.models import (
    calls,
    draws,
    gradients,
    keeping,
    loops,
    norms,
    odd,
    parametrised,
    reaching,
    sequences,
    switched,
    tasks,
    twice,
)
from tests.session.models.training import MODELS

KINDS = (
    *(twice, norms, parametrised, draws, keeping, calls, gradients, sequences),
    *(odd, reaching, switched, loops, tasks),
)


BY_DEFAULT = (draws, keeping, gradients, switched)
"""Kinds that a rank slices, or does not, in ways of their own; tests/programs has models of all kinds by default."""
AGAIN = (
    *("feature_alpha_dropout", "gumbel", "strided_sequences_of_one_step_at_first"),
    *("flag_of_a_namespace", "float_handed_in_that_decides", "buffer_that_decides"),
    *("layers_skipped_by_torchs_chance_as_a_float", "layers_skipped_by_pythons_chance"),
    "layers_skipped_by_numpys_chance",
)
"""Models that show what others of their kind, or tests/programs, show by default."""


def models_of(kind: ModuleType) -> dict[str, Callable[[], Any]]:
    return {name: train for name, train in MODELS.items() if train.__module__ == kind.__name__}


def outcomes(kind: ModuleType, again: bool = False) -> dict[str, Any]:
    """Run each model that is, or is not, in ``AGAIN``; return its list of numbers, or the text of its exception."""
    found: dict[str, Any] = {}
    for name, train in models_of(kind).items():
        if (name in AGAIN) != again:
            continue
        torch.manual_seed(0)
        try:
            found[name] = train()
        except Exception:  # the same on all ranks, or the comparison fails
            found[name] = traceback.format_exc()
    return found


@cache
def in_one_process(kind: ModuleType, again: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = alone(lambda _: outcomes(kind, again))
    return found


@cache
def on_ranks(kind: ModuleType, world_size: int, again: bool) -> list[dict[str, Any]]:
    def program(_: Session) -> dict[str, Any]:
        return outcomes(kind, again)

    return run_ranks(world_size, program, batches="whole", always_slices=True)


@pytest.mark.soak  # tests/programs/test_programs.py has such a run by default
def test_so_they_are_where_only_some_forwards_are_worth_sharing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # About the time of such models' work: batches of 8 pay, and tails of 5 do not.
    monkeypatch.setattr(whole_batch, "COSTS", dict.fromkeys(("memory", "cpu"), whole_batch.SplitCost(0.0, 3e-8, 1e15)))
    wanted = in_one_process(calls)
    for found in run_ranks(3, lambda _: outcomes(calls), batches="whole", always_slices=False):
        assert differences(found, wanted) == [], [text for text in found.values() if isinstance(text, str)]


def cases() -> Iterator[Any]:
    """Yield a run of two ranks, whose blocks of the last batch differ in size; three, and other kinds, in a soak."""
    for kind in KINDS:
        for name in models_of(kind):
            for world_size in (2, 3):
                is_default = world_size == 2 and kind in BY_DEFAULT and name not in AGAIN
                marks = [] if is_default else [pytest.mark.soak]
                yield pytest.param(kind, name, world_size, id=f"{name}-{world_size}", marks=marks)


@pytest.mark.parametrize(("kind", "name", "world_size"), list(cases()))
def test_losses_weights_and_buffers_are_those_of_one_process(kind: ModuleType, name: str, world_size: int) -> None:
    wanted = in_one_process(kind, name in AGAIN)[name]
    assert not isinstance(wanted, str), wanted
    for found in on_ranks(kind, world_size, name in AGAIN):
        assert differences(found[name], wanted) == [], found[name] if isinstance(found[name], str) else ""
