"""``lagom.run_state.random_streams``: seeds that a program takes from the system are equal on all ranks."""

from __future__ import annotations

import random
import secrets
import threading
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks


def fresh_numbers() -> list[float]:
    """A number of each way to ask for a fresh seed."""
    torch.seed()
    random.seed()
    np.random.seed()
    found = [torch.rand(1).item(), random.random(), float(np.random.rand()), float(torch.initial_seed())]
    random.seed(None)
    generator = torch.Generator()
    found += [random.random(), float(generator.seed()), torch.rand(1, generator=generator).item()]
    found += [random.Random().random(), np.random.default_rng().random(), float(np.random.RandomState().rand())]
    found += [float(np.random.Generator(np.random.PCG64()).random()), float(torch.default_generator.seed())]
    return found


class Noise(Dataset[float]):
    """Samples that each come from a generator of their own."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(np.random.default_rng().random())


def in_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.Generator().seed()))
    thread.start()
    thread.join()
    return found[0]


def ask(session: Session) -> dict[str, Any]:
    """Numbers that must be equal on all ranks, and numbers that must not."""
    before = fresh_numbers()
    if session.rank == 0:
        torch.seed()  # on one rank alone
    equal = before + fresh_numbers()
    samples = [float(value) for batch in DataLoader(Noise(), batch_size=6) for value in batch]
    return {"equal": equal + fresh_numbers(), "own": [*samples, in_thread(), secrets.randbits(60), uuid.uuid4().int]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_get_equal_seeds_and_each_call_another(world_size: int) -> None:
    rows = run_ranks(world_size, ask)
    assert all(row["equal"] == rows[0]["equal"] for row in rows)
    assert len(set(rows[0]["equal"])) == len(rows[0]["equal"])
    own = [value for row in rows for value in row["own"]]
    assert len(set(own)) == len(own)
    assert torch.Generator.seed.__qualname__ == "Generator.seed"  # no patch is left in this process


def train() -> float:
    """Noise of a new seed for each batch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4).double()), batch_size=6):
        torch.seed()
        optimizer.zero_grad()
        model(x + torch.randn_like(x)).square().mean().backward()
        optimizer.step()
    return float(model.weight.sum())


def test_each_run_has_other_seeds() -> None:
    found = []
    for world_size in (1, 2, 2):
        config = TorchDistributedConfig(world_size=world_size, launcher="local", run_dir=None, seed=0)
        ranks = experiment.lagom(train, config).per_rank
        assert len(set(ranks)) == 1
        found.append(ranks[0])
    assert len(set(found)) == 3


def test_an_error_names_where_bytes_differ() -> None:
    def train(_: Session) -> None:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(uuid.uuid4().int % 1000 + secrets.randbelow(1000) / 7)
        model(torch.ones(3, 2)).sum().backward()

    with pytest.raises(RankFailedError, match=r"random bytes .* at test_fresh_seeds\.py:\d+, which differ between"):
        run_ranks(2, train)
