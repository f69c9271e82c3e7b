"""``TableReader``: reads a table's rows in the order of an epoch, ahead in a thread, or single rows in any order."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import get_worker_info

from lagom.extensions.data.column_types import values
from lagom.extensions.data.column_types.tensor_columns import ColumnEntry
from lagom.extensions.data.column_types.values import RowSpan
from lagom.extensions.data.parquet.cursor import RowGroupCursor
from lagom.extensions.data.parquet.prefetch import Prefetcher
from lagom.extensions.data.parquet.shard import Epoch, EpochOrder, RankLane, RowPiece, rank_lane
from lagom.extensions.data.parquet.streams import AHEAD, MOST, Source, blocks, decoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.values import Block
    from lagom.extensions.data.parquet.table import Table

_JUMP = 4
"""A jump forward over up to this many blocks reads and skips them; after a longer jump, reading begins anew."""
_DECODED_AHEAD = 4
"""Number of short blocks of cells that are decoded ahead."""
_PASSES = 4
"""Largest number of passes over one data set at the same time."""


class TableReader:
    """Reads a table for one process."""

    lagom_cache = True
    """Tells lagom's loaders that this object is a cache, whose content does not change its results."""

    def __init__(self, table: Table, entries: Sequence[tuple[str, Sequence[ColumnEntry]]], most_bytes: int) -> None:
        self._table = table
        self._source = Source(table, entries)
        self._most_bytes = most_bytes
        self.passes: OrderedDict[Epoch, _Pass] = OrderedDict()
        """Open passes, in the order of their last use."""
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._num_decoded = 0
        self._starts = np.concatenate([[0], np.cumsum(np.array(table.counts, np.int64))])

    def rows(self, epoch: Epoch, places: range) -> list[RowSpan]:
        """Return the rows at positions ``places`` of ``epoch``, in order.

        Raises:
            DataError: if a file has changed or cannot be read, or a row cannot be a tensor.
        """
        narrow = rank_lane(places, epoch.streams)
        current = self.passes.get(epoch)
        if current is None or current.lane != narrow:
            order = EpochOrder(self._table.counts, epoch.seed, epoch.streams, epoch.window)
            if current is not None and narrow.step < current.lane.step and len(places) == 1:
                # A rank without a row in this batch gets another rank's row; its own pass continues afterwards.
                group, row = order.row(places.start)
                return self.pick(self._starts[group : group + 1] + row, is_asked=False)
            self._leave(epoch)
            # Cells are decoded ahead only if all rows that are read are used. A worker uses only some batches. If the
            # number of ranks does not divide ``streams``, a rank uses only some of the rows that it reads.
            decodes = narrow.step == places.step and get_worker_info() is None
            current = self.passes[epoch] = _Pass(
                self._source,
                order,
                narrow,
                len(places) * places.step // narrow.step,
                decodes=decodes,
            )
        self.passes.move_to_end(epoch)
        while len(self.passes) > _PASSES:
            self.passes.popitem(last=False)[1].close()
        found = current.rows(places)
        if current.is_over(places):
            self.passes.pop(epoch).close()
        return found

    def _leave(self, epoch: Epoch) -> None:
        """End the pass over ``epoch``, and passes of the same source that no iterator continues."""
        for other in list(self.passes):
            if other == epoch or (other.source == epoch.source and other.is_left):
                self.passes.pop(other).close()

    def pick(self, index: NDArray[np.int64], *, is_asked: bool = True) -> list[RowSpan]:
        """Return the rows at ``index``, counted in the order of the table.

        The row groups that were used last stay in memory, as many as fit; if the whole table fits, it is one block.

        Args:
            is_asked: whether the program asked for these rows; if so, a warning is shown once when row groups are
                decoded again and again.
        """
        if self._table.row_bytes * int(self._starts[-1]) <= self._most_bytes:
            if not self._blocks:
                self._blocks[0] = values.joined([self._group(number) for number in range(len(self._starts) - 1)])
            return _whole(values.joined([self._blocks[0]], index))
        groups = np.searchsorted(self._starts, index, side="right") - 1
        parts, places = [], []
        for number in np.unique(groups):
            mine = np.flatnonzero(groups == number)
            block = self._kept(int(number), is_asked)
            parts.append(values.joined([block], index[mine] - self._starts[number]))
            places.append(mine)
        return _whole(values.joined(parts, np.argsort(np.concatenate(places))))

    def close(self) -> None:
        """End all threads."""
        for one in self.passes.values():
            one.close()
        self.passes.clear()

    def _kept(self, number: int, is_asked: bool) -> Block:
        block = self._blocks.pop(number, None)
        if block is None:
            block = self._group(number)
            self._num_decoded += is_asked
            if is_asked and self._num_decoded == 2 * len(self._table.groups):
                warnings.warn(_FROM_EVERYWHERE, stacklevel=2)
            held = sum(map(values.num_rows, self._blocks.values())) + values.num_rows(block)
            while self._blocks and held * self._table.row_bytes > self._most_bytes:
                held -= values.num_rows(self._blocks.popitem(last=False)[1])
        self._blocks[number] = block
        return block

    def _group(self, number: int) -> Block:
        whole = RowPiece(number, 0, self._table.counts[number])
        return values.joined(list(RowGroupCursor(self._source, MOST, is_alone=True, is_last=False).read(whole)))


_FROM_EVERYWHERE = (
    "rows are drawn from all over a Parquet table that does not fit into window_bytes: its row groups are decoded over "
    "and over. Use lagom.data.ParquetLoader(dataset, batch_size, shuffle=True), which reads each once, or raise "
    "window_bytes"
)


def _whole(block: Block) -> list[RowSpan]:
    return [RowSpan(block, 0, values.num_rows(block), 1)]


class _Pass:
    """Reads one epoch for one process: the positions of a lane, in order, ahead in a thread."""

    def __init__(self, source: Source, order: EpochOrder, lane: RankLane, size: int, *, decodes: bool) -> None:
        """Make a pass.

        Args:
            size: number of rows of the lane in one batch.
            decodes: whether the thread decodes encoded cells ahead.
        """
        self._size = size
        self._decodes = decodes
        self.lane = lane
        self._source = source
        self._order = order
        self._ahead: Prefetcher[tuple[int, Block]] | None = None
        self._first = 0
        self._last = 0
        self._block: Block | None = None

    def rows(self, places: range) -> list[RowSpan]:
        """Return the rows at ``places``, all of which are in the lane."""
        at = (places.start - self.lane.first) // self.lane.step
        stride = places.step // self.lane.step
        end = at + (len(places) - 1) * stride + 1
        found = []
        while at < end:
            self._go(at)
            assert self._block is not None
            stop = min(end, self._last)
            found.append(RowSpan(self._block, at - self._first, stop - self._first, stride))
            at += -(-(stop - at) // stride) * stride
        return found

    def is_over(self, places: range) -> bool:
        """Return whether the lane ends with ``places``."""
        return places[-1] + self.lane.step >= self._order.num_rows

    def close(self) -> None:
        """End the thread."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._block = None

    def _go(self, at: int) -> None:
        """Load the block that contains position ``at`` of the lane; begin reading anew there if ``at`` is far away."""
        if self._ahead is None or at < self._first or at > self._last + _JUMP * (self._last - self._first):
            self.close()
            decoded_blocks = blocks(self._source, self._order, self.lane, at, self._size)
            if self._decodes and self._source.is_encoded:
                self._ahead = Prefetcher(decoded(decoded_blocks, self._source.table.row_bytes, at), _DECODED_AHEAD)
            else:
                self._ahead = Prefetcher(decoded_blocks, AHEAD if self._order.is_plain else 1)
            self._first = self._last = 0
        while not self._first <= at < self._last:
            self._block = None  # frees the memory before the next block comes
            self._first, self._block = next(self._ahead)
            self._last = self._first + values.num_rows(self._block)
