"""``FastColumns``: which columns of a table are so plain that their pages are decoded by lagom itself."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from lagom.data.columns.petastorm_codecs import NumpySaved, Scalar, computable
from lagom.data.decoders import page_decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.data.columns.tensor_columns import ColumnLeaf
    from lagom.data.decoders.page_decoder import ColumnChunk, Kind
    from lagom.data.parquet.table import OpenedTable, Table

_KNOWN = 1024
"""Row groups of which it is kept where their columns are, for the next epoch."""


class FastColumns:
    """Knows columns by their numbers; the others are read by Arrow, and so is one that turns out to be otherwise."""

    def __init__(self, table: Table, leaves: Sequence[tuple[str, Sequence[ColumnLeaf]]]) -> None:
        self._table = table
        self._kinds: dict[int, Kind] = {}
        self._saved: dict[int, NumpySaved] = {}
        self._known: dict[tuple[int, bool], dict[int, ColumnChunk]] = {}
        self._lock = threading.Lock()
        # What a filter keeps is known when Arrow has read it.
        if not is_there() or table.filter is not None:
            return
        for number, (name, found) in enumerate(leaves):
            if name not in table.partitions and len(found) == 1:
                self._add(number, found[0])

    def _add(self, number: int, leaf: ColumnLeaf) -> None:
        field = self._table.fields[number]
        codec = leaf.codec
        if isinstance(codec, NumpySaved):
            dtype = codec.field.dtype
            if None not in codec.field.shape and dtype is not None and dtype == computable(dtype):
                self._saved[number] = codec
            return
        kind = page_decoder.number(field)
        if kind is not None and (codec is None or (isinstance(codec, Scalar) and codec.dtype == kind.dtype)):
            self._kinds[number] = kind

    def leave(self, numbers: Sequence[int]) -> None:
        """Have Arrow read these columns from now on."""
        for number in numbers:
            self._kinds.pop(number, None)
            self._saved.pop(number, None)
        self._known = {}

    def chunks(self, opened: OpenedTable, group: int, *, threads: bool) -> dict[int, ColumnChunk]:
        """What row group number ``group`` has of such columns; with ``threads`` Arrow has threads for numbers."""
        known = self._known  # that of now: another thread may have learnt that some are not plain
        chunks = known.get((group, threads))
        if chunks is None:
            chunks = self._looked_up(opened, group, threads)
            if len(known) < _KNOWN:
                known[group, threads] = chunks
        return chunks

    def _looked_up(self, opened: OpenedTable, group: int, threads: bool) -> dict[int, ColumnChunk]:
        found = self._table.groups[group]
        numbers = tuple(self._saved)
        if not threads or len(self._table.fields) == 1:
            numbers = (*numbers, *self._kinds)
        metadata = opened.parquet.metadata
        chunks = {}
        for number in dict.fromkeys(numbers):
            name = self._table.fields[number].name
            kind = self._kind(number, opened, found.index, name)
            if kind is not None and name in opened.places:
                one = page_decoder.chunk(metadata, found.index, opened.places[name], kind)
                if one is not None and one.num_values == found.num_rows:
                    chunks[number] = one
        return chunks

    def _kind(self, number: int, opened: OpenedTable, index: int, name: str) -> Kind | None:
        with self._lock:  # to know a cell is to decode a page, once
            return self._looked_at(number, opened, index, name)

    def _looked_at(self, number: int, opened: OpenedTable, index: int, name: str) -> Kind | None:
        kind, codec = self._kinds.get(number), self._saved.get(number)
        if kind is not None or codec is None:
            return kind
        try:
            batch = next(opened.parquet.iter_batches(1, row_groups=[index], columns=[name], use_threads=False))
        except (OSError, ValueError, StopIteration):  # which Arrow says of all of them
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


def is_there() -> bool:
    """Whether lagom was built with its decoder, and that is not switched off by ``LAGOM_NATIVE_PAGES=0``."""
    from lagom.collectives.native import native

    return os.environ.get("LAGOM_NATIVE_PAGES") != "0" and native() is not None
