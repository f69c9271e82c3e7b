"""Where this process stands in a run, for programs that want to know; 0 of 1 in a plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among all ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


_NOWHERE = Place()
_place = _NOWHERE
_hears: Callable[[], None] | None = None


def rank() -> int:
    """This process's rank, from 0; 0 outside a lagom run."""
    if _hears is not None:
        _hears()
    return _place.rank


def world_size() -> int:
    """Number of ranks; 1 outside a lagom run."""
    return _place.world_size


def place_in_run() -> Place | None:
    """Where this process stands in a lagom run; None outside of one. Asked by what is served to programs."""
    return None if _place is _NOWHERE else _place


@contextmanager
def hearing(asked: Callable[[], None]) -> Iterator[None]:
    """Call ``asked`` meanwhile whenever the program asks for its rank."""
    global _hears  # the one place of this process
    before, _hears = _hears, asked
    try:
        yield
    finally:
        _hears = before


@contextmanager
def standing_at(place: Place) -> Iterator[None]:
    """Answer ``rank()`` and ``world_size()`` from ``place`` meanwhile."""
    global _place  # the one place of this process
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before
