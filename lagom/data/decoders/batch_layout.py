"""``BatchLayout``: rows whose columns are numbers, laid out batch by batch. See Note [Batch by batch]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from lagom.data.columns import values
from lagom.data.columns.values import Dense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lagom.data.columns.values import Block, Path

Groups = Sequence[tuple[Sequence[str], "NDArray[Any]"]]
"""Columns of one type each, in their order, and an array of shape (batches, columns, rows of a batch)."""


class BatchLayout(Mapping["Path", Any]):
    """A block, whose tensors of a batch are made at once."""

    __slots__ = ("_places", "count", "groups", "order", "skipped")

    def __init__(self, groups: Groups, order: Sequence[str], skipped: int, count: int) -> None:
        """``count`` rows behind the first ``skipped`` of ``groups``; the columns come in ``order``."""
        self._places: dict[Path, tuple[NDArray[Any], int]] | None = None
        self.groups = groups
        self.skipped = skipped
        self.count = count
        self.order = order

    def __getitem__(self, path: Path) -> _Column:
        if self._places is None:
            self._places = {(name,): (array, at) for names, array in self.groups for at, name in enumerate(names)}
        array, place = self._places[path]
        return _Column(array[:, place], self.skipped, self.count)

    def __iter__(self) -> Iterator[Path]:
        return iter([(name,) for name in self.order])

    def __len__(self) -> int:
        return len(self.order)

    def cut(self, start: int, stop: int) -> BatchLayout:
        """Rows ``start`` to ``stop``, uncopied."""
        return BatchLayout(self.groups, self.order, self.skipped + start, min(stop, self.count) - start)

    def tensors(self, start: int, stop: int) -> dict[str, torch.Tensor] | None:
        """A batch, where rows ``start`` to ``stop`` are one; else none."""
        first = self.skipped + start
        size = self.groups[0][1].shape[2]
        if first % size or stop - start != size:
            return None
        found: dict[str, torch.Tensor] = {}
        for names, array in self.groups:
            whole = torch.from_numpy(array[first // size].reshape(-1))
            # "Unsafe" as each is one of its own to autograd, and may be written to: they share no number.
            found.update(zip(names, torch.unsafe_split(whole, size), strict=True))
        return found if len(self.groups) == 1 else {name: found[name] for name in self.order}


def joined(blocks: Sequence[Block]) -> Block:
    """The rows of ``blocks``, in all no more than a batch, where each has them in the place that they have in it."""
    if not all(isinstance(block, BatchLayout) for block in blocks):
        return values.joined([_plain(block) for block in blocks])
    parts = cast("Sequence[BatchLayout]", blocks)
    groups = []
    for number, (names, like) in enumerate(parts[0].groups):
        _, width, size = like.shape
        out = np.empty((1, width, size), like.dtype)
        for part in parts:
            first, place = divmod(part.skipped, size)
            where = slice(place, place + part.count)
            out[0, :, where] = part.groups[number][1][first, :, where]
        groups.append((names, out))
    skipped = parts[0].skipped % groups[0][1].shape[2]
    return BatchLayout(groups, parts[0].order, skipped, sum(part.count for part in parts))


def cut(block: Block, start: int, stop: int) -> Block:
    """Rows ``start`` to ``stop`` of ``block``, uncopied."""
    return block.cut(start, stop) if isinstance(block, BatchLayout) else values.cut(block, start, stop)


def _plain(block: Block) -> Block:
    return values.cut(block, 0, values.num_rows(block)) if isinstance(block, BatchLayout) else block


class _Column:
    """One of them, for whoever does not want a batch."""

    __slots__ = ("_array", "_count", "_skipped")

    def __init__(self, array: NDArray[Any], skipped: int, count: int) -> None:
        """``array`` has shape (batches, rows of a batch)."""
        self._array = array
        self._skipped = skipped
        self._count = count

    def __len__(self) -> int:
        return self._count

    def cut(self, start: int, stop: int, step: int = 1) -> Dense:
        size = self._array.shape[1]
        begin, end = self._skipped + start, self._skipped + min(stop, self._count)
        first, last = begin // size, -(-end // size)
        some = self._array[first] if last - first == 1 else self._array[first:last].reshape(-1)
        return Dense(some[begin - first * size : end - first * size : step])


# Note [Batch by batch]
#
# A table of 20 numbers is 20 tensors a batch. To make each out of an array, and to let go of it, takes 1.3 us and gives
# the interpreter away three times, twice of which as the memory is numpy's: to threads that decode, which want it at
# that time. Where its columns lie side by side, a batch is one array, whose tensors are made, and let go of, at once.
# So pages are decoded to where a batch has them. That the columns of a batch have one storage is seen by who saves one
# of them; were columns of a block cut as they are, all batches in it would have one, and one that is saved be 30 times
# its size.
