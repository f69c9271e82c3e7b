"""``lagom.batches.dataloader``: the batches that loaders yield on a rank."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import alone, run_ranks, session_alone
from tests.session.loading import Drawing, Nondeterministic, Numbers, OwnLoader, batches, epochs, flat

SHUFFLING: list[dict[str, Any]] = [
    {"shuffle": True},
    {"shuffle": True, "drop_last": True},
    {"shuffle": True, "generator": True},
    {"num_workers": 2, "shuffle": True, "persistent_workers": True, "in_order": False},
    {"sampler": Nondeterministic(22)},
]


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4))])
def test_each_sample_is_used_once_and_the_order_changes(world_size: int) -> None:
    def two_epochs(session: Session, options: dict[str, Any]) -> Any:
        chosen = dict(options)
        if chosen.pop("generator", None):
            chosen["generator"] = torch.Generator().manual_seed(session.rank)
        loader = OwnLoader(Numbers(22), batch_size=7, **chosen)
        assert len(loader) == (3 if "drop_last" in options else 4)
        return epochs(loader, session)

    def run(session: Session) -> list[Any]:
        return [two_epochs(session, options) for options in SHUFFLING]

    for options, *results in zip(SHUFFLING, *run_ranks(world_size, run), strict=True):
        for epoch in range(2):
            parts = [result[epoch] for result in results]
            assert len({len(part) for part in parts}) == 1
            found = flat(parts)
            assert len(found) == len(set(found)) == (21 if "drop_last" in options else 22), options
        assert results[0][0] != results[0][1], options
        assert all(not set(batch) & set(other) for batch, other in zip(results[0][0], results[1][0], strict=True))


@pytest.mark.parametrize("drop_last", [False, True])
def test_per_rank_takes_consecutive_batches(drop_last: bool) -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Numbers(11), batch_sampler=BatchSampler(range(11), 3, False))
        if drop_last:
            loader = DataLoader(Numbers(11), batch_size=3, drop_last=True)
        length = len(loader)
        return length, [(batch.tolist(), session.weight) for batch in loader]

    first, second = run_ranks(2, run, batches="per_rank")
    third = run_ranks(3, run, batches="per_rank")
    if drop_last:
        assert first == (1, [([0, 1, 2], 1.0)])
        assert second == (1, [([3, 4, 5], 1.0)])
    else:
        assert first == (2, [([0, 1, 2], 1.0), ([6, 7, 8], 1.2)])
        assert second == (2, [([3, 4, 5], 1.0), ([9, 10], 0.8)])
        assert [result[1][1] for result in third] == [([9], 1.5), ([10], 1.5), ([9], 0.0)]


def test_evaluation_is_replicated_or_sharded() -> None:
    def run(session: Session) -> Any:
        with torch.no_grad():
            return batches(DataLoader(Numbers(5), batch_size=4))

    assert run_ranks(2, run) == [[[0, 1, 2, 3], [4]]] * 2
    assert run_ranks(2, run, evaluation="sharded") == [[[0, 2], [4]], [[1, 3]]]


def test_a_model_in_eval_mode_makes_a_pass_an_evaluation() -> None:
    def run(session: Session) -> Any:
        model, loss = nn.Sequential(nn.Linear(1, 1), nn.Dropout()), nn.MSELoss()
        frozen = nn.Linear(1, 1).requires_grad_(False)
        training = DataLoader(Numbers(6), batch_size=6)
        seen: list[Any] = []
        for batch in training:
            outputs = model(batch[:, None].float())
            model.eval()
            seen.append(batches(DataLoader(Numbers(4), batch_size=4)))
            model.train()
            seen.append(session.weight)
            loss(outputs, batch[:, None].float()).backward()
        discarded = nn.Linear(2, 2)
        model.eval()
        seen.append(batches(training))
        assert loss.training
        assert frozen.training
        assert discarded.training
        return seen

    whole = [[0, 1, 2, 3]]
    assert run_ranks(2, run) == [[whole, 1.0, [[0, 1, 2, 3, 4, 5]]]] * 2


def test_the_outer_share_holds_again_after_an_inner_pass() -> None:
    def run(session: Session) -> Any:
        weights = []
        outer = iter(DataLoader(Numbers(5), batch_size=5))
        next(outer)
        weights.append(session.weight)
        weights.extend(session.weight for _ in DataLoader(Numbers(2), batch_size=2))
        weights.append(session.weight)
        for _ in DataLoader(Numbers(8), batch_size=2):
            break
        weights.append(session.weight)
        del outer
        pairs = zip(DataLoader(Numbers(2), batch_size=2), DataLoader(Numbers(2), batch_size=2), strict=True)
        weights.extend(session.weight for _ in pairs)
        next(iter(DataLoader(Numbers(5), batch_size=5)))
        return [*weights, session.weight]

    assert run_ranks(2, run)[0] == [1.2, 1.0, 1.2, 1.2, 1.0, 1.2]


def test_an_iteration_that_goes_on_without_gradients_is_told() -> None:
    def run(session: Session) -> Any:
        begun = iter(DataLoader(Numbers(5), batch_size=2))
        next(begun)
        before = any("goes on" in text for text in session.said)
        with torch.no_grad():
            next(begun)
        return before, any("goes on" in text for text in session.said)

    assert run_ranks(2, run) == [(False, True)] * 2


def test_dropping_a_loader_ends_its_workers() -> None:
    def run(_: Session) -> Any:
        loader = DataLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
        seen = batches(loader)
        iterator: Any = loader._iterator
        workers = iterator._workers
        del loader, iterator
        return len(seen), [worker.is_alive() for worker in workers]

    assert run_ranks(2, run) == [(3, [False])] * 2


def test_a_pickled_loader_is_shared_out() -> None:
    text = alone(lambda _: pickle.dumps(DataLoader(TensorDataset(torch.arange(6)), batch_size=6)))

    def run(session: Session) -> Any:
        return [batch.tolist() for (batch,) in pickle.loads(text)]

    assert run_ranks(2, run) == [[[0, 2, 4]], [[1, 3, 5]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_differs_between_ranks_and_the_function_agrees(num_workers: int) -> None:
    def run(session: Session) -> Any:
        torch.rand(3), random.random()
        loader = DataLoader(Drawing(8), batch_size=4, num_workers=num_workers)
        drawn = [(a.tolist(), b.tolist()) for _, a, b in loader]
        return drawn, torch.rand(1).item(), random.random()

    first, second = run_ranks(2, run)
    assert first[1:] == second[1:]
    drawn = [[number for a, b in result[0] for number in a + b] for result in (first, second)]
    assert not set(drawn[0]) & set(drawn[1])
    assert len(set(drawn[0])) == 8


def test_progress_counts() -> None:
    def run(session: Session) -> Any:
        for _ in range(2):
            for _ in DataLoader(Numbers(5), batch_size=2):
                pass
            with torch.no_grad():
                list(DataLoader(Numbers(5)))
        return {**session.progress.report(), "data_s": session.progress.data_s}

    expected: dict[str, Any] = {
        "epoch": 2,
        "step": 3,
        "steps": 3,
        "loss": None,
        "starts": True,
        "values": {},
    }  # nothing has called a function
    (told,) = run_ranks(1, run)
    assert 0 < told.pop("data_s") < 60
    assert told == {**expected, "samples": 10, "ticks": 2 * (3 + 5)}
    assert [result["samples"] for result in run_ranks(2, run)] == [6, 4]


@pytest.mark.gpu
def test_batches_reach_the_device(tmp_path: Any) -> None:
    from lagom.session.patched import patched

    with patched(session_alone(tmp_path, "cuda")):
        for batch in DataLoader(TensorDataset(torch.arange(6.0)[:, None]), batch_size=3, pin_memory=True):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss: Tensor = model(batch[0]).sum()
            loss.backward()
            optimizer.step()
            assert batch[0].is_cuda
            assert loss.is_cuda
            assert all(p.is_cuda for p in model.parameters())
