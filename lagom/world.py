"""``rank`` and ``world_size``: this process's place in a run, for programs that ask; 0 of 1 in a plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Rank and world size of this process, in the run and on its host, and whether ranks have batches of their own."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    divides_batches: bool = False


_NOWHERE = Place()
_place = _NOWHERE
_hears: Callable[[], None] | None = None


def rank() -> int:
    """Return this process's rank, from 0; 0 outside a lagom run."""
    if _hears is not None:
        _hears()
    return _place.rank


def world_size() -> int:
    """Return the number of ranks; 1 outside a lagom run."""
    return _place.world_size


def place_in_run() -> Place | None:
    """Return this process's place in a lagom run, or None outside of one."""
    return None if _place is _NOWHERE else _place


@contextmanager
def rank_calls_reported(asked: Callable[[], None]) -> Iterator[None]:
    """Call ``asked`` in the context whenever the program asks for its rank."""
    global _hears  # the one listener of this process
    before, _hears = _hears, asked
    try:
        yield
    finally:
        _hears = before


@contextmanager
def place_set(place: Place) -> Iterator[None]:
    """Answer ``rank()`` and ``world_size()`` from ``place`` in the context."""
    global _place  # the one place of this process
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before
