"""Who reads which rows of a table, and in which order: pure arithmetic over the row counts of its row groups."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

DEFAULT_STREAMS = 8
"""Canonical streams of a shuffled epoch: ranks whose number divides it read each row group once. See Note [Streams]."""


class RowPiece(NamedTuple):
    """Rows ``start`` to ``stop`` of a row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class EpochOrder:
    """The order of the rows in one epoch; the same whoever asks. See Note [Streams]."""

    counts: tuple[int, ...]
    """Rows of each row group, in the order of the table."""
    seed: int | None
    """Of this epoch; None: the order of the table."""
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
        """Whether it is that of the table."""
        return self.seed is None and self.streams == 1

    @property
    def round_rows(self) -> int:
        """Positions of a round: a window of every stream."""
        return self.streams * self.window

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """Row groups in the order of the epoch."""
        if self.seed is None:
            return np.arange(len(self.counts))
        return _generator(self.seed).permutation(len(self.counts))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Where each of these begins when they lie end to end; and the end."""
        return np.concatenate([[0], np.cumsum(np.array(self.counts, np.int64)[self._groups])])

    def length(self, stream: int) -> int:
        """Rows of ``stream``: its positions are ``stream``, ``stream + streams``, ..."""
        return -(-(self.num_rows - stream) // self.streams) if stream < self.num_rows else 0

    def pieces(self, stream: int, start: int, stop: int) -> list[RowPiece]:
        """What to read for rows ``start`` to ``stop`` of ``stream``, in order."""
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
        """Rows of window ``number`` of ``stream``."""
        return max(0, min(self.window, self.length(stream) - number * self.window))

    def shuffled(self, stream: int, number: int) -> NDArray[np.int64]:
        """The order of the rows of that window."""
        count = self.window_rows(stream, number)
        if self.seed is None:
            return np.arange(count)
        return _generator(self.seed, stream, number).permutation(count)

    def row(self, position: int) -> tuple[int, int]:
        """The row group, and the row in it, at ``position`` of the epoch."""
        index, stream = divmod(position, self.streams)
        number, inside = divmod(index, self.window)
        place = number * self.window + int(self.shuffled(stream, number)[inside])
        (piece,) = self.pieces(stream, place, place + 1)
        return piece.group, piece.start


def _generator(seed: int, *where: int) -> np.random.Generator:
    return np.random.default_rng([seed, *where])


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over a table: with the table, all that decides its order."""

    source: int
    """Tells apart what passes belong to."""
    number: int
    """Tells passes of one process apart."""
    index: int
    """Which epoch it is, from 0."""
    seed: int | None
    streams: int
    window: int
    passing: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    """The iterator that goes over it, in the process that has it."""

    @property
    def is_left(self) -> bool:
        """Whether nobody goes over it any more, as far as is known here."""
        return self.passing is None or self.passing() is None

    def __reduce__(self) -> tuple[type[Epoch], tuple[Any, ...]]:
        return Epoch, (self.source, self.number, self.index, self.seed, self.streams, self.window)


class Positions:
    """Positions of an epoch that make a batch, or a rank's share of one."""

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
        """Rows of the epoch that are used once the whole batch is."""
        return self._whole.stop

    def deal(self, rank: int, world_size: int) -> Positions:
        """The share of ``rank``: positions that leave the remainder ``rank``, so always those of the same streams."""
        start = self.places.start
        mine = range(start + (rank - start) % world_size, self.places.stop, world_size)
        return Positions(self.epoch, mine, self._whole)

    @staticmethod
    def together(batches: Sequence[Positions]) -> Positions:
        """Batches that follow each other, as one."""
        return Positions(batches[0].epoch, range(batches[0].places.start, batches[-1].places.stop))


class RankLane(NamedTuple):
    """The positions of an epoch that leave the remainder ``first`` divided by ``step``: whole streams."""

    first: int
    step: int


def rank_lane(places: range, streams: int) -> RankLane:
    """The narrowest lane of whole streams that ``places`` lie in, and all that are dealt like them."""
    step = gcd(places.step, streams)
    return RankLane(places.start % step, step)


# Note [Streams]
#
# Row groups are permuted, laid end to end, and cut into C streams that differ by at most one row. Position i of the
# epoch is row i // C of stream i % C. Within a stream, rows are shuffled in windows. All of this follows from the
# table's row counts, the seed, C and the window, and from nothing else: not from ranks, workers, batches.
#
# Rank r of W gets, of each batch, the positions i with i % W == r; ranks differ by at most one of them.
# Where W divides C they all lie in C / W streams, so that each rank reads row groups of its own, and a row group
# is read by two ranks only where two streams meet in it. Where W does not divide C, ranks read the streams of
# i % gcd(W, C), which are more than they use; evenness and exactly-once hold all the same.
#
# Streams mix with each other row by row, so a batch of C rows or more has rows of C places of the table, and the
# window adds to that. The classical alternative, a list of row groups for each rank, has another order for each world
# size.
