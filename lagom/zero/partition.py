"""``by_element`` and ``by_parameter``: who holds which part of an optimizer's parameters; pure arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNED = 16
"""Elements: a cut is at a multiple, so that a vector of the processor's does not straddle it."""
_LEAST = 64
"""Elements of a part of a parameter; a parameter that has less than twice as many stays whole."""


class ParameterPiece(NamedTuple):
    """Elements ``start`` to ``end`` of a parameter, in the order of memory."""

    param: int
    """Place of the parameter among those that were cut."""
    start: int
    end: int


def by_element(sizes: Sequence[int], world_size: int) -> list[list[ParameterPiece]]:
    """Cut parameters of ``sizes`` elements, laid end to end, into a stretch for each rank; lengths are all but equal.

    Every element is in exactly one piece. A rank's stretch may be empty where there are hardly any.
    """
    total = sum(sizes)
    bounds = [0, *(_cut(sizes, total * rank // world_size) for rank in range(1, world_size)), total]
    pieces: list[list[ParameterPiece]] = []
    for first, last in pairwise(bounds):
        mine, begin = [], 0
        for index, size in enumerate(sizes):
            start, end = max(first - begin, 0), min(last - begin, size)
            if start < end:
                mine.append(ParameterPiece(index, start, end))
            begin += size
        pieces.append(mine)
    return pieces


def by_parameter(sizes: Sequence[int], world_size: int) -> list[list[ParameterPiece]]:
    """Deal out whole parameters, the largest first, each to the rank that has least."""
    loads = [0] * world_size
    pieces: list[list[ParameterPiece]] = [[] for _ in loads]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        loads[rank] += sizes[index]
        pieces[rank].append(ParameterPiece(index, 0, sizes[index]))
    return [sorted(part) for part in pieces]


def _cut(sizes: Sequence[int], wanted: int) -> int:
    """The place nearest to ``wanted`` at which to cut."""
    begin = 0
    for size in sizes:
        if wanted < begin + size:
            inside = round((wanted - begin) / _ALIGNED) * _ALIGNED
            if _LEAST <= inside <= size - _LEAST:
                return begin + inside
            return begin if 2 * (wanted - begin) < size else begin + size
        begin += size
    return begin
