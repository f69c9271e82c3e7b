"""``FastColumns``: chooses the columns that lagom's own page decoder decodes; Arrow decodes all others.

``LAGOM_PAGE_DECODER=0`` in the environment switches the decoder off: Arrow then decodes all columns.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from lagom.data.column_types.petastorm_codecs import NumpySaved, Scalar, computable
from lagom.data.decoders import page_decoder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from lagom.data.column_types.tensor_columns import ColumnEntry
    from lagom.data.decoders.page_decoder import ColumnChunk, Kind
    from lagom.data.parquet.table import OpenedTable, Table

_KNOWN = 1024
"""Number of row groups whose chunks are remembered for the next epoch."""


class FastColumns:
    """The columns of a table that lagom decodes itself, by number; a column that the decoder cannot read is dropped."""

    def __init__(self, table: Table, entries: Sequence[tuple[str, Sequence[ColumnEntry]]]) -> None:
        self.table = table
        self._kinds: dict[int, Kind] = {}
        self._saved: dict[int, NumpySaved] = {}
        self._known: dict[tuple[int, bool], dict[int, ColumnChunk]] = {}
        self._spare: list[page_decoder.PageDecoder] = []
        self._lock = threading.Lock()
        # Filters work only on columns that Arrow has read.
        if not is_on() or table.filter is not None:
            return
        for number, (name, found) in enumerate(entries):
            if name not in table.partitions and len(found) == 1:
                self._add(number, found[0])

    def _add(self, number: int, entry: ColumnEntry) -> None:
        codec = entry.codec
        if isinstance(codec, NumpySaved):
            dtype = codec.field.dtype
            is_stored = dtype is not None and (codec.is_own or dtype == computable(dtype))
            if None not in codec.field.shape and is_stored:
                self._saved[number] = codec
            return
        kind = page_decoder.number(self.table.fields[number])
        if kind is not None and (codec is None or (isinstance(codec, Scalar) and codec.dtype == kind.dtype)):
            self._kinds[number] = kind

    def reader(self) -> FastReader:
        """Make a reader for one cursor, with the memory of a closed reader if there is one."""
        try:
            return FastReader(self, self._spare.pop())
        except IndexError:
            return FastReader(self, page_decoder.PageDecoder())

    def keep(self, spare: page_decoder.PageDecoder) -> None:
        """Keep ``spare`` for the next reader."""
        self._spare.append(spare)

    def leave(self, numbers: Iterable[int]) -> None:
        """Let Arrow read the columns ``numbers`` from now on."""
        for number in numbers:
            self._kinds.pop(number, None)
            self._saved.pop(number, None)
        self._known = {}

    def chunks(self, opened: OpenedTable, group: int, *, threads: bool) -> dict[int, ColumnChunk]:
        """Return the chunks of the fast columns in row group number ``group``, by column.

        Args:
            threads: whether Arrow decodes in several threads. If so, Arrow gets the columns of numbers, for which it
                is faster, unless the table has only one column.
        """
        known = self._known  # another thread may replace the dict when it drops a column
        chunks = known.get((group, threads))
        if chunks is None:
            chunks = self._looked_up(opened, group, threads)
            if len(known) < _KNOWN:
                known[group, threads] = chunks
        return chunks

    def _looked_up(self, opened: OpenedTable, group: int, threads: bool) -> dict[int, ColumnChunk]:
        found = self.table.groups[group]
        numbers = tuple(self._saved)
        if not threads or len(self.table.fields) == 1:
            numbers = (*numbers, *self._kinds)
        metadata = opened.parquet.metadata
        places = page_decoder.places(metadata) if numbers else {}
        chunks = {}
        for number in dict.fromkeys(numbers):
            name = self.table.fields[number].name
            kind = self._kind(number, opened, found.index, name)
            if kind is not None and name in places:
                one = page_decoder.chunk(metadata, found.index, places[name], kind)
                if one is not None and one.num_values == found.num_rows:
                    chunks[number] = one
        return chunks

    def _kind(self, number: int, opened: OpenedTable, index: int, name: str) -> Kind | None:
        with self._lock:  # looking at a cell decodes a page, so only one thread does it
            return self._looked_at(number, opened, index, name)

    def _looked_at(self, number: int, opened: OpenedTable, index: int, name: str) -> Kind | None:
        kind, codec = self._kinds.get(number), self._saved.get(number)
        if kind is not None or codec is None:
            return kind
        try:
            batch = next(opened.parquet.iter_batches(1, row_groups=[index], columns=[name], use_threads=False))
        except (OSError, ValueError, StopIteration):  # Arrow will raise the error when it reads all rows
            return None
        cell = batch.column(0)[0].as_py()
        shape = tuple(size for size in codec.field.shape if size is not None)
        if cell is not None and codec.field.dtype is not None:
            kind = page_decoder.saved(cell, codec.field.dtype, shape)
        if kind is None:
            self.leave([number])
        else:
            self._kinds[number] = kind
        return kind


class FastReader:
    """Decodes the fast columns for one cursor, row group by row group."""

    def __init__(self, columns: FastColumns, decoder: page_decoder.PageDecoder) -> None:
        self._all = columns
        self._decoder = decoder
        self._chunks: Mapping[int, ColumnChunk] = {}
        self._path = ""

    @property
    def columns(self) -> Collection[int]:
        """Numbers of the columns that this reader decodes in the current row group."""
        return self._chunks

    def begin(self, opened: OpenedTable, group: int, *, threads: bool) -> Collection[int]:
        """Begin row group number ``group``; return the columns that Arrow need not read."""
        table = self._all.table
        self._path = table.files[table.groups[group].file].path
        self._chunks = self._all.chunks(opened, group, threads=threads)
        if self._chunks:
            try:
                self._decoder.begin(opened.file, self._chunks)
            except (OSError, ValueError):  # Arrow will raise the error
                self._chunks = {}
        return self._chunks

    def read(self, count: int) -> Mapping[int, NDArray[Any]] | None:
        """Decode the next ``count`` rows; return None if Arrow must read the row group from here on.

        Raises:
            DataError: if the file was overwritten meanwhile.
        """
        try:
            found = self._decoder.read(count)
        except (OSError, ValueError):
            found = None
        if found is None:
            self._all.leave(self._chunks)
            self._chunks = {}
        else:
            table = self._all.table
            table.stamps.check(table.home, self._path)  # the file may be overwritten while it is read
        return found

    def close(self) -> None:
        """Release the file, and leave the memory to the next reader."""
        self._decoder.end()
        self._all.keep(self._decoder)


def is_on() -> bool:
    """Return whether lagom was built with its page decoder, and the environment does not switch it off."""
    from lagom.collectives.native import native

    return os.environ.get("LAGOM_PAGE_DECODER") != "0" and native() is not None
