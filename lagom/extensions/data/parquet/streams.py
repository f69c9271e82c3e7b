"""``blocks``: reads a table's rows as columns in memory, in the table's order or shuffled in windows."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lagom.extensions.data.column_types import values
from lagom.extensions.data.column_types.encoded_cells import Encoded
from lagom.extensions.data.column_types.petastorm_codecs import CellByCell
from lagom.extensions.data.column_types.reused_arrays import ReusedArrays
from lagom.extensions.data.column_types.tensor_columns import ColumnEntry, Where
from lagom.extensions.data.parquet.cursor import RowGroupCursor
from lagom.extensions.data.parquet.shard import EpochOrder, RankLane, RowPiece
from lagom.extensions.data.parquet.shuffle_window import ShuffleWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.values import Block, Path
    from lagom.extensions.data.parquet.table import OpenedTable, Table

MOST = 1 << 16
"""Largest number of rows that are decoded at a time: fewer are slower, more take more memory."""
AHEAD = 3
"""Number of unshuffled blocks that may be read ahead of the program; these blocks are small."""
_AT_ONCE = 2
"""Limit, in windows, for the rows that threads decode at the same time in an unshuffled epoch."""
_FOOTERS = 256
"""Number of footers that are kept; the footer of a large file has about 1 MB."""
_DECODED_ROWS, _DECODED_BYTES = 512, 1 << 20
"""Largest block of cells that is decoded at a time: rows, and bytes of encoded cells."""

Blocks = Generator[tuple[int, "Block"], None, None]
"""Blocks of rows, each with the position of its first row in the lane."""


class Source:
    """Opens the files of a table, and converts rows of its columns to blocks."""

    def __init__(self, table: Table, entries: Sequence[tuple[str, Sequence[ColumnEntry]]]) -> None:
        self.table = table
        self._entries = entries
        self._shapes: dict[Path, tuple[int, ...]] = {}
        self.memory = ReusedArrays()
        self._footers: OrderedDict[int, Any] = OrderedDict()

    def open(self, file: int) -> OpenedTable:
        """Open the Parquet file number ``file``; footers are kept, since an epoch returns to the same files."""
        opened = self.table.open(file, self._footers.pop(file, None))
        self._footers[file] = opened.parquet.metadata
        if len(self._footers) > _FOOTERS:
            self._footers.popitem(last=False)
        return opened

    @property
    def is_encoded(self) -> bool:
        """Whether the table has columns whose cells are slow to decode."""
        return any(isinstance(entry.codec, CellByCell) for _, entries in self._entries for entry in entries)

    def convert(self, rows: Any, group: int, first: int, *, is_last: bool) -> Block:
        """Convert rows of a row group to a block.

        Args:
            rows: the rows, as an Arrow record batch.
            group: number of the row group.
            first: index, in the row group, of the first of ``rows``.
            is_last: whether the values go into batches without another copy.

        Raises:
            DataError: for a row that cannot be a tensor, or has another shape than earlier rows.
        """
        where = Where(self.table, group, first, self.memory if is_last else None)
        found: dict[Path, Any] = {}
        for column, (_, entries) in zip(rows.columns, self._entries, strict=True):
            for entry in entries:
                found |= entry.convert(column, where)
        for path, column in found.items():
            if isinstance(column, values.Nulls):
                column = found[path] = column.shaped(self._shape_of(path))
            if isinstance(column, values.Dense):
                shape = self._shapes.setdefault(path, column.array.shape[1:])
                if shape != column.array.shape[1:]:
                    raise where.error(path, 0, f"a shape of {column.array.shape[1:]} where others have {shape}")
        return found

    def _shape_of(self, path: Path) -> tuple[int, ...]:
        """Return the shape of a row of ``path``: the known shape, or the shape of the table's first non-null row."""
        if path not in self._shapes:
            number = next(number for number, (name, _) in enumerate(self._entries) if name == path[0])
            entry = next(entry for entry in self._entries[number][1] if entry.path == path)
            without = [other for other in range(len(self._entries)) if other != number]
            for group in range(len(self.table.groups)):
                opened = self.table.open(self.table.groups[group].file).parquet
                for batch in self.table.batches(opened, group, MOST, threads=False, without=without):
                    column = entry.convert(batch.column(0), Where(self.table, group, 0))[path]
                    if isinstance(column, values.Dense) and not isinstance(column, values.Nulls) and len(column):
                        return self._shapes.setdefault(path, column.array.shape[1:])
            self._shapes[path] = (0,)  # all lists of the table are null
        return self._shapes[path]


def blocks(source: Source, order: EpochOrder, lane: RankLane, at: int, size: int) -> Blocks:
    """Yield the rows of ``lane`` in blocks, each with the position of its first row.

    Args:
        at: position in the lane from which rows are needed; the first block may begin earlier.
        size: rows of the lane in a batch. Unshuffled blocks end where batches end.
    """
    if order.is_plain:
        return _in_order(source, order, at, size)
    return _shuffled(source, order, lane, at)


def _in_order(source: Source, order: EpochOrder, at: int, size: int) -> Blocks:
    rest: list[Block] = []
    num_rest = 0
    with closing(_row_groups(source, order, at)) as groups:
        for block in groups:
            count = values.num_rows(block)
            start = 0
            if rest:
                # A batch that crosses two blocks is joined here, in the reading thread, so the program need not wait.
                start = min(count, size - num_rest)
                rest.append(values.cut(block, 0, start))
                num_rest += start
                if num_rest < size:
                    continue
                yield at, values.joined(rest)
                at, rest, num_rest = at + num_rest, [], 0
            stop = count - (count - start) % size
            if stop > start:
                yield at, values.cut(block, start, stop)
                at += stop - start
            if stop < count:
                rest, num_rest = [values.cut(block, stop, count)], count - stop
    if rest:
        yield at, values.joined(rest)


def _row_groups(source: Source, order: EpochOrder, at: int) -> Generator[Block, None, None]:
    """Read the rows from ``at`` on in the order of the table; several threads decode small row groups."""
    most = min(MOST, order.window)
    pieces = deque(order.pieces(0, at, order.num_rows))
    threads = min(torch.get_num_threads(), _AT_ONCE * order.window // max(order.counts))
    if threads < 2:
        cursor = RowGroupCursor(source, most, is_alone=True, is_last=True)
        for piece in pieces:
            yield from cursor.read(piece)
        return

    def read(cursor: RowGroupCursor, piece: RowPiece) -> tuple[RowGroupCursor, list[Block]]:
        return cursor, list(cursor.read(piece))

    with ThreadPoolExecutor(threads) as pool:
        cursors = deque(RowGroupCursor(source, most, is_alone=False, is_last=True) for _ in range(threads))
        reading: deque[Future[tuple[RowGroupCursor, list[Block]]]] = deque()
        while pieces or reading:
            while pieces and cursors:
                reading.append(pool.submit(read, cursors.popleft(), pieces.popleft()))
            cursor, batches = reading.popleft().result()
            cursors.append(cursor)
            yield from batches
            del batches


def _shuffled(source: Source, order: EpochOrder, lane: RankLane, at: int) -> Blocks:
    streams = range(lane.first, order.streams, lane.step)
    # With this limit, rows that are decoded but not used yet take less memory than two rounds.
    most = min(MOST, 2 * order.window)
    is_alone = len(streams) == 1
    size = order.window * len(streams)
    # Copying mostly waits for memory, and numpy releases the GIL meanwhile, so threads help.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        cursors = {stream: RowGroupCursor(source, most, is_alone=is_alone, is_last=False) for stream in streams}
        for number in range(at // size, -(-order.length(lane.first) // order.window)):
            index, bases = _mixed(order, streams, number)
            mixed = ShuffleWindow(index, source.memory)

            def window(
                stream: int, base: int, number: int = number, mixed: ShuffleWindow = mixed
            ) -> list[tuple[list[Path], Block]]:
                found = []
                for piece in order.pieces(stream, number * order.window, (number + 1) * order.window):
                    for block in cursors[stream].read(piece):
                        found.append((list(block), mixed.put(block, base)))
                        base += values.num_rows(block)
                return found

            parts = [part for found in pool.map(window, streams, bases) for part in found]
            yield number * size, mixed.block(parts[0][0], [rest for _, rest in parts], pool)
            del parts, mixed


def decoded(found: Blocks, row_bytes: int, at: int) -> Blocks:
    """Cut blocks into short ones from position ``at`` on, and decode their cells."""
    size = max(1, min(_DECODED_ROWS, _DECODED_BYTES // row_bytes))
    with closing(found):
        for first, block in found:
            for start in range(max(0, at - first), values.num_rows(block), size):
                part = values.cut(block, start, start + size)
                yield (
                    first + start,
                    {path: one.decoded() if isinstance(one, Encoded) else one for path, one in part.items()},
                )


def _mixed(order: EpochOrder, streams: range, number: int) -> tuple[NDArray[np.int64], list[int]]:
    """Return the order of the rows in round ``number``.

    Returns:
        For each place the index of its row in the concatenated windows of ``streams``; and the start of each window.
    """
    index = np.full((order.window_rows(streams[0], number), len(streams)), -1, np.int64)
    bases = [0]
    for column, stream in enumerate(streams):
        rows = order.shuffled(stream, number)
        index[: len(rows), column] = rows + bases[-1]
        bases.append(bases[-1] + len(rows))
    flat = index.ravel()
    return flat if bases[-1] == flat.size else flat[flat >= 0], bases[:-1]


# Note [Whose threads]
#
# Arrow can decode the columns of a row group in threads of its own, which has a price: 20 columns of 15,000 floats in
# 32 row groups take 52 ms of processor time with Arrow's threads, and 36 ms without. If several row groups or streams
# are decoded at the same time, lagom's threads are enough, and each decodes all columns of its row group.
