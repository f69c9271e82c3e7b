"""``partition_by_element`` and ``partition_by_parameter`` divide an optimizer's parameters among the ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNED = 16
"""A cut inside a parameter is at a multiple of this number of elements, so that no SIMD vector straddles a cut."""
_LEAST = 64
"""Fewest elements of a part of a parameter; a parameter with less than twice as many stays whole."""


class ParameterPiece(NamedTuple):
    """Elements ``start`` to ``end`` of a parameter, in the order of memory."""

    param: int
    """Index of the parameter among the sharded parameters of the optimizer."""
    start: int
    end: int


def partition_by_element(sizes: Sequence[int], world_size: int) -> list[list[ParameterPiece]]:
    """Cut parameters of ``sizes`` elements, laid end to end, into a range for each rank, almost equally long.

    Every element is in exactly one piece. A rank's range may be empty if there are very few elements.
    """
    total = sum(sizes)
    bounds = [0, *(_nearest_cut(sizes, total * rank // world_size) for rank in range(1, world_size)), total]
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


def partition_by_parameter(sizes: Sequence[int], world_size: int) -> list[list[ParameterPiece]]:
    """Assign whole parameters, the largest first, each to the rank that has the fewest elements."""
    loads = [0] * world_size
    pieces: list[list[ParameterPiece]] = [[] for _ in loads]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        loads[rank] += sizes[index]
        pieces[rank].append(ParameterPiece(index, 0, sizes[index]))
    return [sorted(part) for part in pieces]


def _nearest_cut(sizes: Sequence[int], wanted: int) -> int:
    """Return a cut near ``wanted``: inside a parameter if its parts are long enough, else at its nearer end."""
    begin = 0
    for size in sizes:
        if wanted < begin + size:
            inside = round((wanted - begin) / _ALIGNED) * _ALIGNED
            if _LEAST <= inside <= size - _LEAST:
                return begin + inside
            return begin if 2 * (wanted - begin) < size else begin + size
        begin += size
    return begin
