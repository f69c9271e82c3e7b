"""Loaders with samples that cannot be loaded: a pass keeps its place, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lagom.errors import DivergenceError
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.loading import Broken, Numbers, Stream


def train(loader: Any, session: Session) -> Any:
    """Train on the loadable samples; return the weight of each batch, the samples, and the resulting slope."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    batches, seen = iter(loader), []
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except (KeyError, ZeroDivisionError):
            continue
        optimizer.zero_grad()
        loss = (model(batch.double()[:, None])[:, 0] - batch).square().mean()
        loss.backward()
        optimizer.step()
        seen.append((batch.tolist(), session.weight))
    return seen, model.weight.item()


def fails_for_one_batch(samples: list[int]) -> torch.Tensor:
    if min(samples) in (4, 5):
        raise ZeroDivisionError
    return torch.tensor(samples)


@pytest.mark.parametrize(
    ("source", "num_workers"),
    [
        (Numbers, 2),
        (Stream, 0),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in ((Numbers, 0), (Stream, 1))),
    ],
)
def test_a_batch_that_fails_on_all_ranks_is_left_out_as_on_one_machine(source: Any, num_workers: int) -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(source(11), batch_size=4, collate_fn=fails_for_one_batch, num_workers=num_workers)
        return train(loader, session)

    _, slope = alone(run)
    first, second = run_ranks(2, run)
    assert first == ([([0, 2], 1.0), ([8, 10], 4 / 3)], pytest.approx(slope, abs=1e-12))
    assert second == ([([1, 3], 1.0), ([9], 2 / 3)], pytest.approx(slope, abs=1e-12))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_batch_that_fails_on_one_rank_is_an_error_that_says_so(num_workers: int) -> None:
    def run(session: Session) -> str:
        with pytest.raises(DivergenceError) as raised:
            train(DataLoader(Broken(16, broken=5), batch_size=4, num_workers=num_workers), session)
        return str(raised.value)

    for text in run_ranks(2, run):
        assert "rank 0 at a backward, rank 1 at the batch after one that could not be loaded" in text
        assert 'batches="whole"' in text


def test_an_exception_of_a_data_set_comes_out_as_it_is() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Broken(4, broken=session.rank), batch_size=4)
        with pytest.raises(KeyError, match=f"sample {session.rank} is broken"):
            next(iter(loader))
        return True

    assert run_ranks(2, run) == [True] * 2


def late() -> Any:
    raise RuntimeError("DataLoader timed out")


def test_a_batch_that_comes_late_is_still_to_come() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Numbers(7), batch_size=4, num_workers=1)
        batches: Any = iter(loader)
        if session.rank == 1:
            fetch, batches._get_data = batches._get_data, late
            with pytest.raises(RuntimeError, match="timed out"):
                next(batches)
            batches._get_data = fetch
        return [(batch.tolist(), session.weight) for batch in batches]

    assert run_ranks(2, run) == [[([0, 2], 1.0), ([4, 6], 4 / 3)], [([1, 3], 1.0), ([5], 2 / 3)]]
