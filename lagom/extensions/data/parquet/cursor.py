"""``RowGroupCursor``: reads pieces of row groups; a piece may continue where the last one ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.extensions.data.column_types.values import Block
    from lagom.extensions.data.parquet.shard import RowPiece
    from lagom.extensions.data.parquet.streams import Source
    from lagom.extensions.data.parquet.table import OpenedTable


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
        self._batches: Iterator[Any] = iter(())
        self._rest: Any = None
        """Rest of the last record batch; None if all of its rows are used."""

    def read(self, piece: RowPiece) -> Iterator[Block]:
        """Yield the rows of ``piece``, in one or more blocks.

        Raises:
            DataError: if the file has changed or cannot be read, or a row cannot be a tensor.
        """
        if piece.group != self._group or piece.start < self._at:
            self._begin(piece.group)
        while self._at < piece.stop:
            rows = self._next()
            skipped = max(0, piece.start - self._at)
            if skipped >= len(rows):
                self._at += len(rows)
                continue
            used = min(len(rows), piece.stop - self._at)
            if used < len(rows):
                self._rest = rows.slice(used)
            first = self._at + skipped
            self._at += used
            if used > skipped:
                yield self._source.convert(
                    rows.slice(skipped, used - skipped), piece.group, first, is_last=self._is_last
                )

    def _begin(self, group: int) -> None:
        table = self._source.table
        file = table.groups[group].file
        if file != self._file or self._opened is None:
            self._opened, self._file = self._source.open(file), file
        opened = self._opened
        self._group, self._at, self._rest = group, 0, None
        self._batches = table.batches(opened.parquet, group, self._most, threads=self._threads)

    def _next(self) -> Any:
        """Return the next rows, as an Arrow record batch."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        batch = next(self._batches, None)
        if batch is None:
            raise self._short()
        return batch

    def _short(self) -> DataError:
        table = self._source.table
        told = table.groups[self._group]
        return DataError(
            f"{table.files[told.file].path}, row group {told.index}, has {self._at} rows, and had {told.num_rows} when "
            "the data set was made"
        )
