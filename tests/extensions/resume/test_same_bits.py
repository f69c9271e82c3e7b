"""A run that goes on from a snapshot has the bits of one that was not interrupted, with as many ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.extensions.resume.row_models import after_asking, both, by_rows, large, train
from tests.extensions.resume.test_idioms import resumed, taken
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
EVERY = 3
"""Batches from one snapshot to the next: sums of two backwards are under way at some."""


def check(world_size: int, slices: bool, program: Callable[[], Any]) -> set[str]:
    """Check that ``program`` goes on from some of its batches; return why it could not be kept at others."""

    def whole(session: Session) -> Any:
        value, points = taken(session, program, EVERY)
        return value, points.taken, set(points.reasons)

    run = partial(run_ranks, world_size, batches="whole", always_slices=slices)
    value, snapshots, reasons = run(whole)[0]
    third = len(snapshots) // 3
    for snapshot in snapshots[third : 2 * third + 1 : third]:
        assert run(partial(value_of_rest, program=program, snapshot=snapshot)) == [value] * world_size

    def plain(_: Session) -> Any:
        seed_everything(7)
        return program()

    assert run(plain) == [value] * world_size
    return set(reasons)


def value_of_rest(session: Session, program: Callable[[], Any], snapshot: Any) -> Any:
    return resumed(session, program, snapshot, at=-1)[0]


@pytest.mark.soak  # the test below does so by default
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("make", "slices"),
    [
        (both, True),  # by rows one of its modules, and whole on each rank the other
        (both, False),
        (by_rows, True),
    ],
)
def test_a_run_goes_on_with_the_same_bits(make: Any, slices: bool, dtype: torch.dtype, world_size: int) -> None:
    assert not check(world_size, slices, partial(train, make, dtype))


@pytest.mark.parametrize(
    ("world_size", "slices"),
    [(2, True), *(pytest.param(*other, marks=pytest.mark.soak) for other in [(3, False), (3, True)])],
)
def test_a_run_that_accumulates_gradients_goes_on_with_the_same_bits(world_size: int, slices: bool) -> None:
    (reason,) = check(world_size, slices, partial(train, both, torch.float32, num_accumulated=2))
    assert "gradients of several backwards are being accumulated" in reason


@pytest.mark.soak
def test_gradients_that_were_averaged_are_averaged_again() -> None:
    """They are equal on all ranks, but a mean of three may be rounded."""
    assert not check(3, False, partial(train, large, torch.float32))


def test_a_program_that_knows_its_rank_is_not_kept() -> None:
    """Its variables on rank 0 are not those of the other ranks."""

    def reasons(session: Session) -> Any:
        return set(taken(session, partial(train, after_asking, torch.float32, num_epochs=1))[1].reasons)

    for found in run_ranks(2, reasons, batches="whole"):
        assert found == {"the program has asked for its rank, so ranks may hold values of their own"}
