"""``lagom.batches.sampler_sync``: all ranks read the samples in rank 0's order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import DivergenceError, LagomError
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.loading import Nondeterministic, Numbers, batches, flat


@pytest.mark.soak  # test_any_loader.py has shuffled batches by default
def test_split_batches_are_those_of_one_machine() -> None:
    def run(session: Session) -> Any:
        return batches(DataLoader(Numbers(10), batch_size=4, shuffle=True))

    plain = alone(run)
    first, second = run_ranks(2, run)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(batch) for batch in plain]


def test_a_sampler_that_raises_raises_everywhere() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(
            Numbers(9), batch_size=2, sampler=Nondeterministic(9, fail_at=5 if session.rank == 0 else 7)
        )
        seen: list[Any] = []
        with pytest.raises(KeyError, match="no more"):
            seen.extend(batch.tolist() for batch in loader)
        return len(seen), torch.rand(1).item()

    first, *others = run_ranks(3, run)
    assert first[0] == 2
    assert all(other == first for other in others)


def test_a_sampler_that_raised_is_at_its_end() -> None:
    def run(session: Session) -> Any:
        loader = DataLoader(Numbers(9), batch_size=None, sampler=Nondeterministic(9, fail_at=2))
        batches = iter(loader)
        next(batches), next(batches)
        with pytest.raises(KeyError, match="no more"):
            next(batches)
        return next(batches, "end")

    assert alone(run) == "end"
    assert run_ranks(2, run) == ["end"] * 2


def test_a_batch_sampler_of_lists_follows_rank_0() -> None:
    def run(session: Session) -> Any:
        order = list(range(9)) if session.rank == 0 else list(range(9))[::-1]
        loader = DataLoader(Numbers(9), batch_sampler=[order[:4], order[4:8], order[8:]])
        seen = batches(loader)
        return seen, loader.batch_sampler == [order[:4], order[4:8], order[8:]], session.progress.samples_trained

    assert run_ranks(2, run) == [([[0, 2], [4, 6], [8]], True, 5), ([[1, 3], [5, 7], [8]], True, 4)]


@pytest.mark.parametrize("end", [5, 1], ids=["all", "one"])  # ranks that draw
@pytest.mark.parametrize("draw", [torch.randn, np.random.rand, lambda count: random.choices(range(9), k=count)])
def test_common_numbers_stay_common_after_uneven_draws(draw: Callable[[int], Any], end: int) -> None:
    def run(session: Session) -> Any:
        seen = []
        for batch in DataLoader(Numbers(5), batch_size=3):
            if drawing := int((batch < end).sum()):
                draw(drawing)
            seen.append(0)
        return torch.rand(1).item(), random.random(), np.random.rand(), len(seen)

    first, second = run_ranks(2, run)
    assert first == second


def test_a_seed_that_the_program_sets_after_an_uneven_batch_holds() -> None:
    def run(session: Session) -> Any:
        for _ in DataLoader(Numbers(5), batch_size=3):
            break
        seed_everything(7)
        shuffled = DataLoader(Numbers(8), batch_size=8, shuffle=True)
        return batches(shuffled)[0], torch.rand(1).item(), random.random(), np.random.rand()

    (wanted, *numbers), found = alone(run), run_ranks(2, run)
    assert found == [(wanted[rank::2], *numbers) for rank in range(2)]


def test_streams_that_nobody_drew_from_unevenly_go_on() -> None:
    def run(session: Session) -> Any:
        for batch in DataLoader(Numbers(5), batch_size=3):
            random.choices(range(9), k=len(batch))
        return torch.rand(1).item(), np.random.rand()

    plain = alone(run)
    assert run_ranks(2, run) == [plain, plain]


def test_an_evaluation_within_a_step_keeps_the_order_of_one_machine() -> None:
    def run(session: Session) -> Any:
        seen = []
        for _ in range(2):
            for batch in DataLoader(Numbers(9), batch_size=3, shuffle=True):
                seen.append(batch.tolist())
                with torch.no_grad():
                    seen.extend(batches(DataLoader(Numbers(4), batch_size=4, shuffle=True)))
        return seen

    plain, (first, second) = alone(run), run_ranks(2, run)
    for wanted, mine, other in zip(plain, first, second, strict=True):
        assert sorted({*mine, *other}) == sorted(wanted)
        assert len(wanted) == 3 or mine == other == wanted


def test_drifted_streams_of_one_rank_are_brought_back() -> None:
    def run(session: Session) -> Any:
        if session.rank == 1:
            torch.rand(1), random.random(), np.random.rand()
        seen = flat([batches(DataLoader(Numbers(8), batch_size=4, shuffle=True))])
        return seen, (torch.rand(1).item(), random.random(), np.random.rand())

    (mine, drawn), (others, others_drawn) = run_ranks(2, run)
    assert sorted(mine + others) == list(range(8))
    assert drawn == others_drawn


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("sampler", [None, list(range(10))])
def test_a_rank_that_leaves_a_loop_alone_is_an_error_for_the_others_and_no_hang(
    world_size: int, sampler: list[int] | None
) -> None:
    def train(session: Session) -> str:
        model = torch.nn.Linear(1, 1)
        loader = DataLoader(TensorDataset(torch.rand(10, 1)), batch_size=4, sampler=sampler)
        try:
            for epoch in range(4):
                for (inputs,) in loader:
                    model(inputs).mean().backward()
                if session.rank == 1 and epoch == 1:
                    break
            session.backwards.divergence.check_end(session.backwards.agreement)  # type: ignore[union-attr, arg-type]
        except DivergenceError as error:
            return str(error)
        return ""

    # Rank 1, which left, is at the end of the program: it gets a warning.
    told = run_ranks(world_size, train)
    for text in told[:1] + told[2:]:
        assert "rank 0 at the start of a pass over a data loader, rank 1 at the end of the program" in text


ITEMS: list[Any] = [
    *(3, np.int64(2), np.float32(0.5), 1.5, True, None, "a.png", b"raw", (1, "x"), [4, [5]], {1, 2}, {"i": (7,)}),
    *(slice(1, 3), range(4), torch.tensor([1, 2]), torch.tensor(3), np.array([[1], [2]])),
]


class Keyed(Numbers):
    def __getitem__(self, index: Any) -> Any:
        return repr(index), type(index).__name__


def test_whatever_a_sampler_yields_other_ranks_get_as_it_is() -> None:
    def run(session: Session) -> Any:
        mine = ITEMS if session.rank == 0 else [0] * len(ITEMS)
        return list(DataLoader(Keyed(9), batch_size=None, sampler=mine))

    plain = alone(run)
    assert run_ranks(2, run, batches="whole") == [plain, plain]


class Unusual:
    pass


class UnusualError(Exception):
    pass


def test_what_cannot_be_told_to_other_ranks_is_an_error_on_all_of_them() -> None:
    def run(session: Session) -> Any:
        with pytest.raises(LagomError, match=r"ranks cannot tell each other a tests.*Unusual"):
            list(DataLoader(Keyed(9), batch_size=None, sampler=[Unusual()]))
        return True

    assert run_ranks(2, run) == [True, True]


def test_an_exception_of_the_program_that_only_rank_0_meets_is_told_as_text() -> None:
    def draw(session: Session) -> Iterator[int]:
        yield 1
        if session.rank == 0:
            raise UnusualError("a file is gone")

    def run(session: Session) -> Any:
        try:
            list(DataLoader(Numbers(9), 1, sampler=draw(session)))
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    text = "the sampler of a data loader raised UnusualError on rank 0: a file is gone"
    assert run_ranks(2, run) == [("UnusualError", "a file is gone"), ("LagomError", text)]


class ByScore(torch.utils.data.Sampler[int]):
    """A sampler of the hardest samples first, by the scores that the loop gave them."""

    def __init__(self) -> None:
        self.scores = torch.zeros(12)

    def __iter__(self) -> Iterator[int]:
        yield from self.scores.argsort(descending=True, stable=True).tolist()

    def __len__(self) -> int:
        return 12


class Shuffled(ByScore):
    """A sampler in an order from the common random numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12).tolist()


def test_an_order_that_follows_what_the_loop_saw_is_told_of() -> None:
    def program(session: Session) -> list[bool]:
        model, found = torch.nn.Linear(1, 1), []
        for sampler in (Shuffled(), ByScore()):
            session.said.clear()
            for _epoch in range(2):
                for (x,) in DataLoader(TensorDataset(torch.arange(12.0)[:, None]), batch_size=4, sampler=sampler):
                    model(x).mean().backward()
                    sampler.scores[x[:, 0].long()] = x[:, 0].fmod(5)
            found.append(any("follows what the loop has seen" in text for text in session.said))
        return found

    assert run_ranks(2, program) == [[False, True]] * 2
    assert run_ranks(2, program, batches="whole") == [[False, False]] * 2
