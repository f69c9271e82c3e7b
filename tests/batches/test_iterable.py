"""``lagom.batches.iterable``: each rank gets its share of the batches of an iterable data set."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from lagom.errors import DivergenceError
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.loading import (
    Numbers,
    Shuffled,
    Sized,
    Stream,
    Unseeded,
    WorkerSharded,
    batches,
    dealt,
    epochs,
    flat,
    noisy_collate,
    seen,
)

KINDS: dict[str, dict[str, Any]] = {
    "in this process": {},
    "drop_last": {"drop_last": True},
    "a worker": {"num_workers": 1},
    "workers": {"num_workers": 2, "in_order": False},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def two_passes(session: Session, **options: Any) -> Any:
    if session.world_size == 1:
        options.pop("in_order", None)  # the order would be arbitrary
    return epochs(DataLoader(WorkerSharded(13), batch_size=4, **options), session)


def check_dealt_out(results: list[Any], plain: Any) -> None:
    assert plain[0] == plain[1]
    for epoch in range(2):
        for number, batch in enumerate(plain[epoch]):
            assert [result[epoch][number] for result in results] == dealt(batch, len(results))


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, [kind for kind in KINDS if kind != "a worker"]),  # several workers show it
        *(pytest.param(n, list(KINDS), marks=pytest.mark.soak) for n in (2, 3)),
    ],
    ids=["2", "all-2", "all-3"],
)
def test_each_rank_gets_its_share_of_the_batches_of_one_machine(world_size: int, kinds: list[str]) -> None:
    def run(session: Session) -> Any:
        return {kind: two_passes(session, **KINDS[kind]) for kind in kinds}

    plain, results = alone(run), run_ranks(world_size, run)
    for kind in kinds:
        check_dealt_out([result[kind] for result in results], plain[kind])


# Such a worker imports torch, which takes seconds, so only rank 1 has one. For lagom both methods are the same.
@pytest.mark.soak  # test_self_sharded.py has a stream in such a worker, and test_any_loader.py deals out its batches
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_so_it_does_from_workers_that_are_started_anew(method: str) -> None:
    def run(session: Session) -> Any:
        context = method if session.rank == 1 else "fork"
        return two_passes(session, num_workers=1, multiprocessing_context=context, persistent_workers=True)

    check_dealt_out(run_ranks(2, run), alone(run))


@pytest.mark.soak  # the next test has two such workers
def test_workers_that_all_give_everything_do_so_as_on_one_machine() -> None:
    def run(session: Session) -> Any:
        return seen(DataLoader(ChainDataset([Stream(3), Stream(2)]), batch_size=2, num_workers=2), session)

    plain = alone(run)
    assert len(flat([plain])) == 10
    for number, mine in enumerate(zip(*run_ranks(2, run), strict=True)):
        assert list(mine) == dealt(plain[number], 2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drawn_samples_are_those_of_one_machine(num_workers: int) -> None:
    def run(session: Session) -> Any:
        found = []
        for parts in DataLoader(Shuffled(11), batch_size=3, num_workers=num_workers):
            count = len(parts[0]) if session.passes.share is None else session.passes.share.num_mine
            found.append([part.tolist()[:count] for part in parts])
        return found

    plain, results = alone(run), run_ranks(2, run)
    for number, batch in enumerate(plain):
        for part in range(4):
            assert [result[number][part] for result in results] == dealt(batch[part], 2)


# The test above has workers by default.
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_each_sample_comes_once_though_collate_and_the_program_draw_by_their_share(num_workers: int) -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Shuffled(11), batch_size=3, num_workers=num_workers, collate_fn=noisy_collate)
        found = []
        for (number, *_), _ in loader:
            count = len(number) if session.passes.share is None else session.passes.share.num_mine
            found.append(number.tolist()[:count])
            torch.rand(len(number)), random.random(), np.random.rand(len(number))
        return found, torch.rand(1).item(), random.random(), np.random.rand()

    results = run_ranks(2, run)
    assert flat([result[0] for result in results]) == sorted(list(range(11)) * max(num_workers, 1))
    assert len({result[1:] for result in results}) == 1


def test_collate_draws_other_numbers_on_other_ranks() -> None:
    def run(_: Session) -> Any:
        loader = DataLoader(Stream(8), batch_size=4, num_workers=1, collate_fn=noisy_collate)
        return [number for _, drawn in loader for number in drawn]

    first, second = run_ranks(2, run)
    assert len({*first, *second}) == 8


class Points(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 2, dtype=torch.float64)

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.x)).tolist():
            yield self.x[index], torch.sin(self.x[index, :1])


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("batches", ["split", "per_rank", "whole"])
def test_the_weights_are_those_of_one_machine(world_size: int, batches: Any) -> None:
    def run(session: Session) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        points = Points(20)  # the last batch has 2
        for _ in range(2):
            # With per_rank: the batch size with which one process does the same.
            for x, y in DataLoader(points, batch_size=6 if session.world_size > 1 else size):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return [part.detach() for part in model.state_dict().values()]

    size = 6 * world_size if batches == "per_rank" else 6
    expected = alone(run)
    for result in run_ranks(world_size, run, batches=batches):
        for found, wanted in zip(result, expected, strict=True):
            if world_size == 1:
                assert torch.equal(found, wanted)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_per_rank_takes_batches_in_turn_and_deals_out_a_tail() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Sized(11), batch_size=3)
        return len(loader), [(batch.tolist(), session.weight) for batch in loader]

    first, second = run_ranks(2, run, batches="per_rank")
    assert first == (2, [([0, 1, 2], 1.0), ([6, 7, 8], 1.2)])
    assert second == (2, [([3, 4, 5], 1.0), ([9, 10], 0.8)])

    def dropping(session: Session) -> Any:
        loader = DataLoader(Sized(11), batch_size=3, drop_last=True)
        return len(loader), batches(loader)

    assert run_ranks(2, dropping, batches="per_rank") == [(1, [[0, 1, 2]]), (1, [[3, 4, 5]])]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.soak), {"num_workers": 1, "persistent_workers": True}],
    ids=["here", "worker"],
)
def test_an_evaluation_sees_everything_also_with_workers_that_trained_before(options: dict[str, Any]) -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Stream(5), batch_size=4, **options)
        found = [batches(loader)]
        with torch.no_grad():
            found.append(batches(loader))
        next(iter(loader))
        with torch.no_grad():
            next(iter(loader))
        return [*found, batches(loader)]

    whole = [[0, 1, 2, 3], [4]]
    first, second = run_ranks(2, run)
    assert first == [[[0, 2], [4]], whole, [[0, 2], [4]]]
    assert second == [[[1, 3], [4]], whole, [[1, 3], [4]]]
    first, second = run_ranks(2, run, evaluation="sharded")
    assert first == [[[0, 2], [4]], [[0, 2], [4]], [[0, 2], [4]]]
    assert second == [[[1, 3], [4]], [[1, 3]], [[1, 3], [4]]]


@pytest.mark.parametrize(
    ("num_workers", "grad", "options"),
    [
        *((0, True, {"batches": kind}) for kind in ("split", "whole")),
        *((0, False, {"evaluation": kind}) for kind in ("gathered", "sharded")),
        # What ranks compare is made where batches are collated, in a worker as here.
        pytest.param(2, True, {"batches": "split"}, marks=pytest.mark.soak),
        pytest.param(2, False, {"evaluation": "sharded"}, marks=pytest.mark.soak),
    ],
)
def test_a_stream_that_differs_between_ranks_is_an_error_on_all_of_them(
    num_workers: int, grad: bool, options: dict[str, Any]
) -> None:
    def run(session: Session) -> str:
        with torch.set_grad_enabled(grad), pytest.raises(DivergenceError) as raised:
            list(DataLoader(Unseeded(50), batch_size=8, num_workers=num_workers))
        return str(raised.value)

    assert all("lagom_sharded = True" in text and "fixed seed" in text for text in run_ranks(2, run, **options))


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_a_stream_that_differs_later_or_ends_sooner_is_an_error_too(batch_size: int) -> None:
    class Drifting(Stream):
        def __init__(self, rank: int, ends: bool) -> None:
            self.rank, self.ends = rank, ends

        def __iter__(self) -> Any:
            for number in range(40):
                if number >= 20 and self.rank == 1 and self.ends:
                    return
                yield number + (1000 if number >= 20 and self.rank == 1 else 0)

    def run(session: Session) -> Any:
        model = nn.Linear(1, 1)

        def train(ends: bool) -> None:
            for x in DataLoader(Drifting(session.rank, ends), batch_size=batch_size):
                model(x[:, None].float()).mean().backward()

        told = []
        for ends in (False, True):
            with pytest.raises(DivergenceError) as raised:
                train(ends)
            told.append(str(raised.value))
        return told

    for told in run_ranks(2, run):
        assert "other samples on other ranks" in told[0]
        assert "other samples on other ranks" in told[1] or "different points of the program" in told[1]


def test_probes_breaks_and_zips_stay_in_step() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Shuffled(9), batch_size=4)
        probe = next(iter(loader))[0].tolist()
        broken = []
        for batch in loader:
            broken.append(batch[0].tolist())
            break
        zipped = [a[0].tolist() + b[0].tolist() for a, b in zip(loader, loader, strict=True)]
        return [probe], broken, zipped[:-1]

    plain, results = alone(run), run_ranks(2, run)
    for part in range(3):
        mine = zip(*(result[part] for result in results), strict=True)
        assert [sorted(chain.from_iterable(parts)) for parts in mine] == [sorted(batch) for batch in plain[part]]


def test_a_stream_without_batches_is_seen_by_all_and_that_is_said() -> None:
    def run(session: Session) -> Any:
        return (
            [int(x) for x in DataLoader(Stream(), batch_size=None)],
            [int(x) for x in DataLoader(Numbers(2), batch_size=None)],
            session.weight,
            session.progress.samples_trained,
            any('batches="whole"' in text for text in session.said),
        )

    assert run_ranks(2, run) == [(list(range(7)), [0, 1], 1.0, 9, True)] * 2
