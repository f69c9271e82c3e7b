"""``EpochOrder``: computes which rank reads which rows of a table, and in which order, from row counts and a seed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lagom.batches.batch_shares import BatchIndices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

DEFAULT_STREAMS = 8
"""Number of streams of a shuffled epoch. If the number of ranks divides it, ranks share few row groups.

See Note [Streams].
"""


class RowPiece(NamedTuple):
    """The rows from ``start`` to ``stop`` of a row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class EpochOrder:
    """The order of the rows in one epoch, equal on all ranks and workers. See Note [Streams]."""

    counts: tuple[int, ...]
    """Rows of each row group, in the order of the table."""
    seed: int | None
    """Seed of this epoch; None for the order of the table."""
    streams: int
    window: int
    """Rows of one stream that are shuffled together."""

    def __post_init__(self) -> None:
        assert self.streams >= 1
        assert self.window >= 1
        assert min(self.counts, default=0) >= 0

    @cached_property
    def num_rows(self) -> int:
        """Rows of the table."""
        return sum(self.counts)

    @property
    def is_plain(self) -> bool:
        """Whether the rows are in the order of the table."""
        return self.seed is None and self.streams == 1

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """Numbers of the row groups, in the order of the epoch."""
        if self.seed is None:
            return np.arange(len(self.counts))
        return _generator(self.seed).permutation(len(self.counts))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Position of the first row of each of ``_groups`` when these are concatenated; last, the number of rows."""
        return np.concatenate([[0], np.cumsum(np.array(self.counts, np.int64)[self._groups])])

    def length(self, stream: int) -> int:
        """Return the number of rows of ``stream``; its positions are ``stream``, ``stream + streams``, ..."""
        return -(-(self.num_rows - stream) // self.streams) if stream < self.num_rows else 0

    def pieces(self, stream: int, start: int, stop: int) -> list[RowPiece]:
        """Return the pieces of row groups to read for rows ``start`` to ``stop`` of ``stream``, in order."""
        short, long = divmod(self.num_rows, self.streams)
        offset = stream * short + min(stream, long)
        first, last = offset + start, offset + min(stop, self.length(stream))
        pieces = []
        place = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:
            begin, end = int(self._starts[place]), int(self._starts[place + 1])
            if end > first:
                pieces.append(RowPiece(int(self._groups[place]), first - begin, min(end, last) - begin))
            first, place = max(first, end), place + 1
        return pieces

    def window_rows(self, stream: int, number: int) -> int:
        """Return the number of rows in window ``number`` of ``stream``."""
        return max(0, min(self.window, self.length(stream) - number * self.window))

    def shuffled(self, stream: int, number: int) -> NDArray[np.int64]:
        """Return the shuffled order of the rows in window ``number`` of ``stream``."""
        count = self.window_rows(stream, number)
        if self.seed is None:
            return np.arange(count)
        return _generator(self.seed, stream, number).permutation(count)

    def row(self, position: int) -> tuple[int, int]:
        """Return the row group, and the row in it, at ``position`` of the epoch."""
        index, stream = divmod(position, self.streams)
        number, inside = divmod(index, self.window)
        place = number * self.window + int(self.shuffled(stream, number)[inside])
        (piece,) = self.pieces(stream, place, place + 1)
        return piece.group, piece.start


def _generator(seed: int, *where: int) -> np.random.Generator:
    return np.random.default_rng([seed, *where])


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over a table. Together with the table it determines the order of rows."""

    source: int
    """Number of the sampler to which the pass belongs; -1 for rows that are read by index, without a sampler."""
    number: int
    """Number of the pass, unique in its process."""
    index: int
    """Number of the epoch, from 0."""
    seed: int | None
    streams: int
    window: int
    passing: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    """The pass's iterator; None in other processes."""

    @property
    def is_left(self) -> bool:
        """Whether the pass's iterator is gone, or is in another process."""
        return self.passing is None or self.passing() is None

    def __reduce__(self) -> tuple[type[Epoch], tuple[Any, ...]]:
        return Epoch, (self.source, self.number, self.index, self.seed, self.streams, self.window)


class Positions(BatchIndices):
    """The positions in an epoch that make a batch, or a rank's share of a batch.

    Ranks split them by streams, so that each rank reads few row groups: see Note [Streams].
    """

    __slots__ = ("_whole", "epoch", "places")

    def __init__(self, epoch: Epoch, places: range, whole: range | None = None) -> None:
        self.epoch = epoch
        self.places = places
        self._whole = places if whole is None else whole

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __getitem__(self, index: slice) -> Positions:
        return Positions(self.epoch, self.places[index], self._whole)

    def __reduce__(self) -> tuple[object, ...]:
        return Positions, (self.epoch, self.places, self._whole)

    @property
    def end(self) -> int:
        """Number of rows of the epoch up to the end of the whole batch."""
        return self._whole.stop

    def deal(self, rank: int, world_size: int) -> Positions:
        """Return the positions p with ``p % world_size == rank``, which are in the same streams in every batch."""
        start = self.places.start
        mine = range(start + (rank - start) % world_size, self.places.stop, world_size)
        return Positions(self.epoch, mine, self._whole)

    @staticmethod
    def together(batches: Sequence[Positions]) -> Positions:
        """Join batches that follow each other into one."""
        return Positions(batches[0].epoch, range(batches[0].places.start, batches[-1].places.stop))


class RankLane(NamedTuple):
    """Positions of an epoch with the remainder ``first`` modulo ``step``; they consist of whole streams."""

    first: int
    step: int


def rank_lane(places: range, streams: int) -> RankLane:
    """Return the narrowest lane of whole streams that contains ``places`` and the rank's other shares."""
    step = gcd(places.step, streams)
    return RankLane(places.start % step, step)


# Note [Streams]
#
# Row groups are permuted, concatenated, and cut into C streams whose lengths differ by at most one row. Position i of
# the epoch is row i // C of stream i % C. Within a stream, rows are shuffled in windows. The order depends only on the
# table's row counts, the seed, C and the window: not on ranks, workers or batches.
#
# Where batches are split, rank r of W gets the positions i with i % W == r of each batch, so the shares of ranks differ
# by at most one row. If W divides C, these positions are in C / W streams. Then each rank reads row groups of its own,
# and two ranks read the same row group only if two streams meet in it. If W does not divide C, a rank reads the streams
# with the same remainder modulo gcd(W, C), and does not use all of their rows. Shares are still even, and each row
# comes once.
#
# Streams alternate row by row, so a batch of at least C rows has rows from C places of the table, and the window mixes
# further. The usual alternative, a list of row groups for each rank, has another order for each world size.
