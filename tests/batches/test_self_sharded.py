"""``lagom.batches.self_sharded``: data sets that shard themselves are not sharded again, but weighted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lagom
from lagom.batches.self_sharded import cut_to_first_sample
from lagom.errors import DivergenceError, LagomError
from lagom.session.session import Session
from lagom.world import Place, place_set
from tests.ranks import check_against_one_process, run_ranks
from tests.session.loading import Numbers, RankSharded, Stream, batches


def placed(session: Session) -> Any:
    return place_set(Place(session.rank, session.world_size, session.rank, session.world_size))


# tests/batches/sharing/test_loader_trial.py has workers that ask for their rank by default.
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.soak)],
    ids=["here", "worker"],
)
def test_each_sample_counts_once_though_ranks_have_other_numbers_of_batches(options: dict[str, Any]) -> None:
    def run(session: Session) -> Any:
        with placed(session):
            loader = DataLoader(RankSharded(11), batch_size=2, **options)
            return [[(batch.tolist(), session.weight) for batch in loader] for _ in range(2)]

    first, second, third = run_ranks(3, run)
    assert first[0] == [
        ([0, 1], 1.0),
        ([2, 3], 1.2),
    ]
    assert second[0] == [([4, 5], 1.0), ([6, 7], 1.2)]
    assert third[0] == [([8, 9], 1.0), ([10], 0.6)]
    first, second = run_ranks(2, run)
    assert first[0] == [([0, 1], 1.0), ([2, 3], 1.0), ([2], 0.0), ([2], 0.0)]
    assert second[0] == [([4, 5], 1.0), ([6, 7], 1.0), ([8, 9], 2.0), ([10], 2.0)]
    assert first[0] == first[1]
    assert second[0] == second[1]


@pytest.mark.soak
def test_workers_that_are_started_anew_know_their_rank() -> None:
    def run(session: Session) -> Any:
        with placed(session):
            if session.rank == 0:  # such a worker imports torch, which takes seconds
                return batches(DataLoader(RankSharded(6), batch_size=4))
            return batches(DataLoader(RankSharded(6), batch_size=4, num_workers=1, multiprocessing_context="spawn"))

    assert run_ranks(2, run) == [[[0, 1, 2, 3]], [[4, 5]]]


class Part(IterableDataset[Any]):
    """Makes its own batches: each rank's part of a common one."""

    lagom_sharded = True

    def __init__(self, sizes: list[list[int]], *, with_texts: bool = False) -> None:
        total = sum(map(sum, sizes))
        self.x = torch.randn(total, 2, dtype=torch.float64)
        self.sizes = sizes
        self.with_texts = with_texts

    def __iter__(self) -> Any:
        start = 0
        for step in self.sizes:
            parts = torch.split(self.x[start : start + sum(step)], step)
            start += sum(step)
            part = torch.cat(parts) if lagom.world_size() == 1 else parts[lagom.rank()]
            if self.with_texts and len(part):
                yield {"name": ["a text"] * len(part), "x": part.clone()}
            elif len(part):
                yield part


@pytest.mark.parametrize("with_texts", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["views", "texts"])
@pytest.mark.parametrize(
    "sizes",
    [pytest.param([[3, 2], [1, 4], [4, 4]], marks=pytest.mark.soak), [[2, 2], [3, 0], [5, 0]]],
    ids=["uneven", "ends"],
)
def test_the_weights_are_those_of_the_batches_taken_together(sizes: list[list[int]], with_texts: bool) -> None:
    def run(session: Session) -> list[Tensor]:
        with placed(session):
            model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            part = Part(sizes, with_texts=with_texts)
            for _ in range(2):
                for batch in DataLoader(part, batch_size=None):
                    x = batch["x"] if with_texts else batch
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), torch.sin(x[:, :1])).backward()
                    optimizer.step()
            return [tensor.detach() for tensor in model.state_dict().values()]

    check_against_one_process(run)


def test_what_stands_for_no_sample_may_be_changed_before_the_model_gets_it() -> None:
    """Even where this rank has had a batch of one sample that counted."""

    def run(session: Session) -> Tensor:
        with placed(session):
            model = nn.Linear(2, 1).double()
            for batch in DataLoader(Part([[2, 2], [3, 1], [5, 0]]), batch_size=None):
                model(batch.double() / 3).square().mean().backward()
            assert model.weight.grad is not None
            return model.weight.grad

    check_against_one_process(run)


def test_its_draws_leave_the_common_streams_equal() -> None:
    class Drawing(Stream):
        lagom_sharded = True

        def __init__(self, rank: int) -> None:
            self.order = torch.arange(4)
            self.rank = rank

        def __iter__(self) -> Any:
            torch.rand(self.rank + 1)
            yield from (torch.rand(()).item() for _ in range(3))

    def run(session: Session) -> Any:
        drawn = [x for batch in DataLoader(Drawing(session.rank), batch_size=2) for x in batch.tolist()]
        with torch.no_grad():
            list(DataLoader(Drawing(session.rank), batch_size=2))
        return drawn, torch.rand(1).item()

    first, second = run_ranks(2, run)
    assert not set(first[0]) & set(second[0])
    assert first[1] == second[1]


def test_a_rank_without_a_batch_is_an_error_on_all_ranks() -> None:
    def run(session: Session) -> Any:
        with placed(session):
            empty = DataLoader(RankSharded(0), batch_size=2)
            told = [str(len(list(empty)))]
            with pytest.raises(DivergenceError) as raised:
                list(DataLoader(RankSharded(3), batch_size=2))
            return [*told, str(raised.value)]

    for count, text in run_ranks(2, run):
        assert count == "0"
        assert "no batch for 1 of 2 ranks" in text


def test_a_data_set_with_indices_may_say_so_too_and_an_evaluation_sees_the_ranks_own() -> None:
    def run(session: Session) -> Any:
        numbers: Any = Numbers(3 + session.rank)
        numbers.lagom_sharded = True
        loader = DataLoader(numbers, batch_size=2)
        with torch.no_grad():
            evaluated = batches(loader)
        return len(loader), [(batch.tolist(), session.weight) for batch in loader], evaluated

    first, second = run_ranks(2, run)
    assert first == (2, [([0, 1], 1.0), ([2], pytest.approx(2 / 3))], [[0, 1], [2]])
    assert second == (2, [([0, 1], 1.0), ([2, 3], pytest.approx(4 / 3))], [[0, 1], [2, 3]])


def test_a_gathered_evaluation_leaves_it_alone() -> None:
    def run(session: Session) -> Any:
        model = nn.Linear(1, 1).double()
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        with placed(session), torch.no_grad():
            return [model(x[:, None].double())[:, 0].tolist() for x in DataLoader(RankSharded(4), batch_size=2)]

    assert run_ranks(2, run, evaluation="gathered") == [[[0, 1], [2, 3]], []]


def test_whole_batches_of_it_are_refused() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(RankSharded(3), batch_size=2)
        with pytest.raises(LagomError, match='use batches="split"'):
            iter(loader)

    run_ranks(2, run, batches="whole")


def test_what_stands_for_no_sample_is_cut_to_one_where_all_tensors_have_a_row_for_each() -> None:
    x, y = torch.arange(6).view(3, 2), torch.arange(3)
    cut = cut_to_first_sample({"x": x, "y": (y, "name")}, 3)
    assert cut["x"].tolist() == [[0, 1]]
    assert cut["x"]._base is None  # a view would count as the batch before
    assert cut["y"][0].tolist() == [0]
    assert cut["y"][1] == "name"
    packed = [x.view(-1), y]
    assert cut_to_first_sample(packed, 3) is packed
