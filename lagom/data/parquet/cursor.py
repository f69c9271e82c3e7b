"""``RowGroupCursor``: reads pieces of row groups; a piece may continue where the last one ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from lagom.data.column_types.values import Block
    from lagom.data.parquet.shard import RowPiece
    from lagom.data.parquet.streams import Source
    from lagom.data.parquet.table import OpenedTable


class RowGroupPart(NamedTuple):
    """Rows of a row group: some columns decoded by Arrow, the others by lagom."""

    batch: Any
    """Arrow's record batch with the columns that Arrow decoded; None if there are none."""
    arrays: Mapping[int, NDArray[Any]]
    """The columns that lagom decoded, by number."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.batch) if self.batch is not None else len(next(iter(self.arrays.values())))

    def cut(self, start: int, stop: int) -> RowGroupPart:
        """Return the rows from ``start`` to ``stop``, without a copy."""
        batch = None if self.batch is None else self.batch.slice(start, stop - start)
        return RowGroupPart(batch, {number: array[start:stop] for number, array in self.arrays.items()})


class RowGroupCursor:
    """Reads pieces of row groups; a later piece of the same row group does not decode earlier rows again."""

    def __init__(self, source: Source, most: int, *, is_alone: bool, is_last: bool) -> None:
        """Make a cursor.

        Args:
            most: largest number of rows to decode at a time.
            is_alone: whether no other cursor decodes at the same time, so that Arrow may use several threads; see
                Note [Whose threads] in streams.py.
            is_last: whether the rows go into batches without another copy.
        """
        self._source = source
        self._is_last = is_last
        self._most = most
        self._threads = is_alone and torch.get_num_threads() > 1
        self._file = -1
        self._opened: OpenedTable | None = None
        self._group = -1
        self._at = 0
        self._fast = source.fast.reader()
        self._batches: Iterator[Any] | None = None
        self._rest: RowGroupPart | None = None

    def close(self) -> None:
        """Leave the memory of lagom's decoder to the next cursor, and let the decoder release its file."""
        self._fast.close()

    def read(self, piece: RowPiece) -> Iterator[Block]:
        """Yield the rows of ``piece``, in one or more blocks.

        Raises:
            DataError: if the file has changed or cannot be read, or a row cannot be a tensor.
        """
        if piece.group != self._group or piece.start < self._at:
            self._begin(piece.group)
        while self._at < piece.stop:
            rows = self._next(piece.stop - self._at)
            skipped = max(0, piece.start - self._at)
            if skipped >= rows.num_rows:
                self._at += rows.num_rows
                continue
            used = min(rows.num_rows, piece.stop - self._at)
            if used < rows.num_rows:
                self._rest = rows.cut(used, rows.num_rows)
            first = self._at + skipped
            self._at += used
            if used > skipped:
                yield self._source.convert(rows.cut(skipped, used), piece.group, first, is_last=self._is_last)

    def _begin(self, group: int) -> None:
        table = self._source.table
        file = table.groups[group].file
        if file != self._file or self._opened is None:
            self._opened, self._file = self._source.open(file), file
        opened = self._opened
        self._group, self._at, self._rest = group, 0, None
        columns = self._fast.begin(opened, group, threads=self._threads)
        self._batches = None
        if len(columns) < len(table.fields):
            self._batches = table.batches(opened.parquet, group, self._most, threads=self._threads, without=columns)

    def _next(self, wanted: int) -> RowGroupPart:
        """Return the next rows: those of Arrow's next batch, or up to ``wanted`` rows if Arrow decodes no column."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        batch = None
        if self._batches is not None:
            batch = next(self._batches, None)
            if batch is None:
                raise self._short()
            wanted = len(batch)
        if not self._fast.columns or not wanted:
            return RowGroupPart(batch, {})
        arrays = self._fast.read(min(wanted, self._most))
        return self.read_by_arrow() if arrays is None else RowGroupPart(batch, arrays)

    def read_by_arrow(self) -> RowGroupPart:
        """Read the row group again by Arrow, since lagom's decoder failed; return rows from the current one on."""
        assert self._opened is not None
        self._batches = self._source.table.batches(self._opened.parquet, self._group, self._most, threads=self._threads)
        behind = self._at
        for batch in self._batches:
            if behind < len(batch):
                return RowGroupPart(batch.slice(behind), {})
            behind -= len(batch)
        raise self._short()

    def _short(self) -> DataError:
        table = self._source.table
        told = table.groups[self._group]
        return DataError(
            f"{table.files[told.file].path}, row group {told.index}, has {self._at} rows, and had {told.num_rows} when "
            "the data set was made"
        )
