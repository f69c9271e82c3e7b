"""A backward that fails, and whose exception the program catches: harmless on all ranks, an error on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks


class Fails(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise torch.OutOfMemoryError("out of memory")


def trained(fails: Callable[[int], bool], num_backwards: int, width: int = 4) -> list[Tensor]:
    """Weights after 24 batches, of which those are skipped that fail."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(144, 3).double(), torch.randn(144, 1).double())
    num_done = 0
    for i, (x, y) in enumerate(DataLoader(data, batch_size=6)):
        loss = nn.functional.mse_loss(model(x), y)
        try:
            (Fails.apply(loss) if fails(i) else loss).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            continue
        num_done += 1
        if num_done % num_backwards == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("num_backwards", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_on_all_ranks_it_is_as_in_one_process(num_backwards: int) -> None:
    def run(_: Session) -> list[Tensor]:
        return trained(lambda i: i in (4, 13, 14, 20), num_backwards)

    check_against_one_process(run, atol=1e-13)


@pytest.mark.parametrize(
    ("num_backwards", "width", "where"),
    [
        *((1, 4, [13, 17]), (1, 4, [99, 13]), (3, 4, [99, 13])),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in ((3, 4, [99, 14]), (1, 150_000, [13, 17]))),
    ],
    ids=["on each, elsewhere", "on one", "on one that accumulates", "with the last that accumulates", "large"],
)
def test_on_one_rank_it_is_an_error_on_all(num_backwards: int, width: int, where: list[int]) -> None:
    def run(session: Session) -> list[Tensor]:
        return trained(lambda i: i == where[session.rank], num_backwards, width)

    with pytest.raises(RankFailedError, match=r"DivergenceError.*rank \d at (the start|.* after 1 that failed)"):
        run_ranks(2, run)


def test_a_program_that_catches_the_error_too_is_told_at_its_end() -> None:
    def run(session: Session) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        for i in range(12):
            loss = model(torch.ones(4, 3)).mean()
            with contextlib.suppress(RuntimeError):
                (Fails.apply(loss) if i == 5 + session.rank else loss).backward()  # type: ignore[no-untyped-call]
        assert session.backwards.divergence is not None
        assert session.backwards.agreement is not None
        session.backwards.divergence.check_end(session.backwards.agreement)

    with pytest.raises(RankFailedError, match=r"DivergenceError: the program caught this error and went on, .* points"):
        run_ranks(2, run)


@pytest.mark.soak  # tests/gradients/test_cached_backward.py has ranks on different batches
@pytest.mark.parametrize("num_backwards", [1, 3])
def test_ranks_that_leave_out_other_batches_are_told(num_backwards: int) -> None:
    def run(session: Session, skips: tuple[int, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(144, 3).double(), torch.randn(144, 1).double())
        num_done = 0
        for i, (x, y) in enumerate(DataLoader(data, batch_size=6)):
            loss = nn.functional.mse_loss(model(x), y)
            if i == skips[session.rank]:
                continue
            loss.backward()
            num_done += 1
            if num_done % num_backwards == 0:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    expected = alone(lambda session: run(session, (4,)))
    for found in run_ranks(2, lambda session: run(session, (4, 4))):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    # As often, and in the middle of training, so that nothing else tells.
    with pytest.raises(RankFailedError, match=r"DivergenceError.* at a backward.* on batch [\d, ]+ of a pass, rank 1"):
        run_ranks(2, lambda session: run(session, (13, 14)))


@pytest.mark.soak  # test_gradient_averager.py has such values, two tests above such a program
def test_nor_can_initial_values_that_differ_be_caught_and_forgotten() -> None:
    def run(session: Session) -> None:
        model = nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.fill_(float(session.rank))
        for _ in range(3):
            with contextlib.suppress(RuntimeError):
                model(torch.ones(4, 3)).mean().backward()
        assert session.backwards.divergence is not None
        assert session.backwards.agreement is not None
        session.backwards.divergence.check_end(session.backwards.agreement)

    with pytest.raises(
        RankFailedError, match=r"DivergenceError: the program caught this error and went on, .*Linear\.weight"
    ):
        run_ranks(2, run)
