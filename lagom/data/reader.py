"""Rows of a table in memory: in the order of an epoch, read ahead in a thread, or any rows at any time."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import get_worker_info

from lagom.data import values
from lagom.data.ahead import Ahead
from lagom.data.cells import Encoded
from lagom.data.codecs import Slow
from lagom.data.columns import Leaf, Where
from lagom.data.shard import Epoch, Lane, Order, Piece, lane
from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from lagom.data.table import Table
    from lagom.data.values import Block, Path

_MOST = 1 << 16
"""Rows that are decoded at a time: fewer are slower, more take memory."""
_JUMP = 4
"""Blocks that are read and dropped rather than begin anew behind them."""
_DECODED_AHEAD, _DECODED_ROWS, _DECODED_BYTES = 4, 512, 1 << 20
"""Blocks of cells that are decoded ahead, and how large they are, encoded."""
_PASSES = 4
"""Over one data set that go on at the same time."""


class Reader:
    """Reads a table for one process."""

    def __init__(self, table: Table, leaves: Sequence[tuple[str, Sequence[Leaf]]], most_bytes: int) -> None:
        self._table = table
        self._source = _Source(table, leaves)
        self._most_bytes = most_bytes
        self._passes: OrderedDict[int, _Pass] = OrderedDict()
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._num_decoded = 0
        self._starts = np.concatenate([[0], np.cumsum(np.array(table.counts, np.int64))])

    def rows(self, epoch: Epoch, places: range) -> list[Block]:
        """The rows at ``places`` of ``epoch``, in blocks that follow each other.

        Raises:
            DataError: when they cannot be read.
        """
        order = Order(self._table.counts, epoch.seed, epoch.streams, epoch.window)
        narrow = lane(places, epoch.streams)
        current = self._passes.get(epoch.source)
        if current is None or (current.epoch, current.lane) != (epoch, narrow):
            if current is not None and current.epoch == epoch and len(places) == 1:
                # A row of others, in place of one that this rank lacks; the pass goes on with its own.
                group, row = order.row(places.start)
                return [self.pick(self._starts[group : group + 1] + row)]
            if current is not None:
                current.close()
            # A worker has some batches only, and a rank whose number divides no streams some rows.
            decodes = narrow.step == places.step and get_worker_info() is None
            current = self._passes[epoch.source] = _Pass(self._source, order, epoch, narrow, decodes=decodes)
        self._passes.move_to_end(epoch.source)
        while len(self._passes) > _PASSES:
            self._passes.popitem(last=False)[1].close()
        found = current.rows(places)
        if current.is_over(places):
            self._passes.pop(epoch.source).close()
        return found

    def pick(self, index: NDArray[np.int64]) -> Block:
        """The rows at ``index``, counted in the order of the table.

        Row groups stay in memory, as many as there is room for; all of them as one block where they fit.
        """
        if self._table.row_bytes * int(self._starts[-1]) <= self._most_bytes:
            if not self._blocks:
                self._blocks[0] = values.joined([self._group(number) for number in range(len(self._starts) - 1)])
            return values.joined([self._blocks[0]], index)
        groups = np.searchsorted(self._starts, index, side="right") - 1
        parts, places = [], []
        for number in np.unique(groups):
            mine = np.flatnonzero(groups == number)
            block = self._kept(int(number))
            parts.append(values.joined([block], index[mine] - self._starts[number]))
            places.append(mine)
        back = np.argsort(np.concatenate(places))
        return values.joined(parts, back)

    def close(self) -> None:
        """End all threads."""
        for one in self._passes.values():
            one.close()
        self._passes.clear()

    def _kept(self, number: int) -> Block:
        block = self._blocks.pop(number, None)
        if block is None:
            block = self._group(number)
            self._num_decoded += 1
            if self._num_decoded == 2 * len(self._table.groups):
                warnings.warn(_FROM_EVERYWHERE, stacklevel=2)
            held = sum(map(values.num_rows, self._blocks.values())) + values.num_rows(block)
            while self._blocks and held * self._table.row_bytes > self._most_bytes:
                held -= values.num_rows(self._blocks.popitem(last=False)[1])
        self._blocks[number] = block
        return block

    def _group(self, number: int) -> Block:
        whole = Piece(number, 0, self._table.counts[number])
        return values.joined(list(_Cursor(self._source, _MOST).read(whole)))


_FROM_EVERYWHERE = (
    "rows are drawn from all over a Parquet table that does not fit into window_bytes: its row groups are decoded over "
    "and over. Use lagom.data.ParquetLoader(dataset, batch_size, shuffle=True), which reads each once, or raise "
    "window_bytes"
)


class _Source:
    """A table, and how its columns are converted."""

    def __init__(self, table: Table, leaves: Sequence[tuple[str, Sequence[Leaf]]]) -> None:
        self.table = table
        self._leaves = leaves
        self._shapes: dict[Path, tuple[int, ...]] = {}

    @property
    def is_encoded(self) -> bool:
        """Whether there are columns whose cells take time to decode."""
        return any(isinstance(leaf.codec, Slow) for _, leaves in self._leaves for leaf in leaves)

    def convert(self, batch: Any, group: int, first: int) -> Block:
        """The rows of a record batch, the first of which is row ``first`` of row group number ``group``."""
        where = Where(self.table, group, first)
        found: dict[Path, Any] = {}
        for number, (_, leaves) in enumerate(self._leaves):
            column = batch.column(number)
            for leaf in leaves:
                found |= leaf.convert(column, where)
        for path, column in found.items():
            if isinstance(column, values.Dense):
                shape = self._shapes.setdefault(path, column.array.shape[1:])
                if shape != column.array.shape[1:]:
                    raise where.error(path, 0, f"a shape of {column.array.shape[1:]} where others have {shape}")
        return found


class _Cursor:
    """Reads pieces of row groups, each from where the one before ended."""

    def __init__(self, source: _Source, most: int) -> None:
        self._source = source
        self._most = most
        self._file = -1
        self._opened: Any = None
        self._group = -1
        self._at = 0
        self._batches: Iterator[Any] = iter(())
        self._rest: Any = None

    def read(self, piece: Piece) -> Iterator[Block]:
        """The rows of ``piece``."""
        if piece.group != self._group or piece.start < self._at:
            self._begin(piece.group)
        while self._at < piece.stop:
            batch = self._next()
            skipped = max(0, piece.start - self._at)
            if skipped >= len(batch):
                self._at += len(batch)
                continue
            used = min(len(batch), piece.stop - self._at)
            if used < len(batch):
                self._rest = batch.slice(used)
            part = batch.slice(skipped, used - skipped)
            first = self._at + skipped
            self._at += used
            if len(part):
                yield self._source.convert(part, piece.group, first)

    def _begin(self, group: int) -> None:
        table = self._source.table
        file = table.groups[group].file
        if file != self._file:
            self._opened, self._file = table.open(file), file
        self._batches = table.batches(self._opened, group, self._most)
        self._group, self._at, self._rest = group, 0, None

    def _next(self) -> Any:
        if self._rest is not None:
            batch, self._rest = self._rest, None
            return batch
        for batch in self._batches:
            return batch
        table = self._source.table
        told = table.groups[self._group]
        raise DataError(
            f"{table.files[told.file].path}, row group {told.index}, has {self._at} rows, and had {told.num_rows} when "
            "the data set was made"
        )


class _Pass:
    """What one process reads of an epoch: the positions of a lane, in order, ahead in a thread."""

    def __init__(self, source: _Source, order: Order, epoch: Epoch, lane: Lane, *, decodes: bool) -> None:
        """With ``decodes``, cells are decoded ahead: all of the lane is for this process."""
        self.epoch = epoch
        self._decodes = decodes
        self.lane = lane
        self._source = source
        self._order = order
        self._ahead: Ahead[tuple[int, Block]] | None = None
        self._first = 0
        self._last = 0
        self._block: Block | None = None

    def rows(self, places: range) -> list[Block]:
        """The rows at ``places``, all in the lane."""
        at = (places.start - self.lane.first) // self.lane.step
        stride = places.step // self.lane.step
        end = at + (len(places) - 1) * stride + 1
        found = []
        while at < end:
            self._go(at)
            assert self._block is not None
            stop = min(end, self._last)
            found.append(values.cut(self._block, at - self._first, stop - self._first, stride))
            at += -(-(stop - at) // stride) * stride
        return found

    def is_over(self, places: range) -> bool:
        """Whether nothing of the lane comes after ``places``."""
        return places[-1] + self.lane.step >= self._order.num_rows

    def close(self) -> None:
        """End the thread."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._block = None

    def _go(self, at: int) -> None:
        """Have the block that position ``at`` of the lane is in."""
        if self._ahead is None or at < self._first or at > self._last + _JUMP * (self._last - self._first):
            self.close()
            found = blocks(self._source, self._order, self.lane, at)
            if self._decodes and self._source.is_encoded:
                self._ahead = Ahead(_decoded(found, self._source.table.row_bytes, at), _DECODED_AHEAD)
            else:
                self._ahead = Ahead(found)
            self._first = self._last = 0
        while not self._first <= at < self._last:
            self._block = None  # before the next one comes
            self._first, self._block = next(self._ahead)
            self._last = self._first + values.num_rows(self._block)


def blocks(source: _Source, order: Order, lane: Lane, at: int) -> Iterator[tuple[int, Block]]:
    """The rows of ``lane`` from position ``at`` of it or before, each block with the position that it begins at."""
    streams = range(lane.first, order.streams, lane.step)
    if order.seed is None and order.streams == 1:
        cursor = _Cursor(source, min(_MOST, order.window))
        for piece in order.pieces(0, at, order.num_rows):
            for block in cursor.read(piece):
                yield at, block
                at += values.num_rows(block)
        return
    cursors = {stream: _Cursor(source, min(_MOST, order.window)) for stream in streams}
    size = order.window * len(streams)
    for number in range(at // size, -(-order.length(lane.first) // order.window)):
        parts: list[Block] = []
        for stream, cursor in cursors.items():
            for piece in order.pieces(stream, number * order.window, (number + 1) * order.window):
                parts += cursor.read(piece)
        yield number * size, values.joined(parts, _mixed(order, streams, number))
        del parts


def _decoded(found: Iterator[tuple[int, Block]], row_bytes: int, at: int) -> Iterator[tuple[int, Block]]:
    """Blocks cut in short ones from position ``at`` on, whose cells are decoded."""
    size = max(1, min(_DECODED_ROWS, _DECODED_BYTES // row_bytes))
    for first, block in found:
        for start in range(max(0, at - first), values.num_rows(block), size):
            part = values.cut(block, start, start + size)
            yield (
                first + start,
                {path: one.decoded() if isinstance(one, Encoded) else one for path, one in part.items()},
            )


def _mixed(order: Order, streams: range, number: int) -> NDArray[np.int64]:
    """Where the rows of round ``number`` are in the windows of ``streams``, one behind another."""
    index = np.full((order.window_rows(streams[0], number), len(streams)), -1, np.int64)
    base = 0
    for column, stream in enumerate(streams):
        rows = order.shuffled(stream, number)
        index[: len(rows), column] = rows + base
        base += len(rows)
    flat = index.ravel()
    return flat if base == flat.size else flat[flat >= 0]
