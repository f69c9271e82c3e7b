"""``PageDecoder``: decodes row-group columns of fixed-size values without Arrow. See Note [Pages of our own]."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lagom.data.column_types import types
from lagom.data.column_types.petastorm_codecs import read_header
from lagom.data.decoders.reused_arrays import ReusedArrays
from lagom.data.sources.footers import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_PHYSICAL = {"int32": "INT32", "int64": "INT64", "float": "FLOAT", "double": "DOUBLE"}
"""Arrow's number types that have the same bytes in pages and in memory, and Parquet's names of these types."""
_ENCODINGS = {"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"}
"""Encodings of values and levels in columns that may be decoded here; ``csrc/pages.cpp`` checks each page."""
_STARVED, _UNUSUAL = 1, 2
"""Results of the C++ decoder, as in ``csrc/pages.hpp``: it needs more bytes; it cannot decode the page."""


class Kind(NamedTuple):
    """Describes how the values of a column are stored, and what shape and type they get."""

    physical: str
    """Parquet's physical type."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one value; () for numbers."""
    prefix: bytes
    """Bytes with which each value begins, such as the header of a saved array."""


class ColumnChunk(NamedTuple):
    """Place of a column chunk in the file, and how the chunk is stored."""

    kind: Kind
    offset: int
    size: int
    """Bytes in the file."""
    whole: int
    """Bytes after decompression."""
    num_values: int
    is_snappy: bool
    is_optional: bool


def number(field: Any) -> Kind | None:
    """Return the kind of a column of numbers; None if its bytes differ between file and memory."""
    physical = _PHYSICAL.get(str(field.type))
    dtype = types.as_stored(field.type)
    if physical is None or dtype is None or sys.byteorder != "little":
        return None
    return Kind(physical, dtype, (), b"")


def saved(cell: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Kind | None:
    """Return the kind of a column of arrays in the format of ``numpy.save``, with ``cell`` as an example.

    Return None if the cell is not an array of ``dtype`` and ``shape`` whose bytes can be copied to a batch.
    """
    header = read_header(cell)
    size = prod(shape) * dtype.itemsize
    if header is None or header[:3] != (shape, False, dtype) or not dtype.isnative or not size:
        return None
    if len(cell) != header.size + size or dtype.kind not in "biuf":
        return None
    return Kind("BYTE_ARRAY", dtype, shape, cell[: header.size])


def places(metadata: Any) -> dict[str, tuple[int, str, bool]]:
    """Return number, Parquet's type and whether nulls are allowed for top-level columns that are no lists, by name."""
    schema = metadata.schema
    found = {}
    for place in range(len(schema)):
        column = schema.column(place)
        if column.max_repetition_level == 0 and column.max_definition_level <= 1 and column.path == column.name:
            found[column.name] = place, column.physical_type, column.max_definition_level == 1
    return found


def chunk(metadata: Any, group: int, place: tuple[int, str, bool], kind: Kind) -> ColumnChunk | None:
    """Return a column's chunk of row group number ``group``; None if its pages cannot be decoded here."""
    number, physical, is_optional = place
    part = metadata.row_group(group)
    column = part.column(number)
    compression = column.compression
    if physical != kind.physical or compression not in ("SNAPPY", "UNCOMPRESSED") or column.file_path:
        return None
    if column.num_values != part.num_rows or not _ENCODINGS.issuperset(column.encodings):
        return None
    first, size = column.data_page_offset, column.total_compressed_size
    dictionary = column.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < first:
        first = dictionary
    whole = column.total_uncompressed_size
    return ColumnChunk(kind, first, size, whole, part.num_rows, compression == "SNAPPY", is_optional)


class PageDecoder:
    """Decodes columns, row group by row group, into reused memory."""

    def __init__(self) -> None:
        self._native: dict[int, Any] = {}
        self._memories: dict[int, ReusedArrays] = {}
        self._windows: dict[int, _Window] = {}
        self._chunks: Mapping[int, ColumnChunk] = {}
        self._whole = np.empty(0, np.uint8)

    def begin(self, file: Any, chunks: Mapping[int, ColumnChunk]) -> None:
        """Begin to decode ``chunks``, the column chunks of one row group in ``file`` by number of the column."""
        from lagom.collectives.native import native

        self._chunks = chunks
        for number, one in chunks.items():
            if number not in self._native:
                self._native[number] = native().Pages()
                self._memories[number] = ReusedArrays()
                self._windows[number] = _Window()
            kind = one.kind
            size = prod(kind.shape) * kind.dtype.itemsize
            is_bytes = kind.physical == "BYTE_ARRAY"
            told = one.is_snappy, one.is_optional, is_bytes, kind.prefix, size, one.num_values, one.whole
            self._native[number].begin(*told)
        first = min(one.offset for one in chunks.values())
        last = max(one.offset + one.size for one in chunks.values())
        is_small = all(one.size <= PAGE_BYTES for one in chunks.values())
        if is_small and 4 * sum(one.size for one in chunks.values()) >= 3 * (last - first):
            self._whole = _at_least(self._whole, last - first)
            there = _read(file, first, self._whole[: last - first])
            whole, address = self._whole[:there], self._whole.ctypes.data
            for number, one in chunks.items():
                self._windows[number].fill(whole, address, one.offset - first, one.size)
        else:
            for number, one in chunks.items():
                self._windows[number].begin(file, one.offset, one.size)

    def end(self) -> None:
        """Release the file."""
        for window in self._windows.values():
            window.end()

    def read(self, count: int) -> dict[int, NDArray[Any]] | None:
        """Return the next ``count`` values of each column; None if a page cannot be decoded here.

        Raises:
            OSError: if the file cannot be read.
        """
        found = {
            number: self._memories[number].empty((count, *one.kind.shape), one.kind.dtype)
            for number, one in self._chunks.items()
        }
        outs = {number: array.ctypes.data for number, array in found.items()}
        return found if self._read(outs, count) else None

    def _read(self, outs: Mapping[int, int], count: int) -> bool:
        """Decode ``count`` values of each column to its address in ``outs``; return False if a page is unusual."""
        from lagom.collectives.native import native

        done = dict.fromkeys(outs, 0)
        while done:
            told = []
            for number, rows in done.items():
                window = self._windows[number]
                out = outs[number], count, 0  # `Pages::Out`: contiguous values
                told.append((self._native[number], window.address, window.size, *out, rows, count - rows))
            for number, (used, rows, status, wanted) in zip(list(done), native().read_pages(told), strict=True):
                self._windows[number].use(used)
                if status == _UNUSUAL or (status == _STARVED and not self._windows[number].refill(wanted)):
                    return False
                done[number] += rows
                if status != _STARVED:
                    del done[number]
        return True


class _Window:
    """The bytes of a column that have been read from the file but not decoded."""

    def __init__(self) -> None:
        self._own = np.empty(0, np.uint8)
        self._data = self._own
        self._first = 0
        self._at = 0
        self._file: Any = None
        self._next = 0
        self._left = 0

    @property
    def address(self) -> int:
        return self._first + self._at

    @property
    def size(self) -> int:
        return len(self._data) - self._at

    def fill(self, data: NDArray[np.uint8], first: int, start: int, size: int) -> None:
        """Use ``size`` bytes of ``data`` from ``start`` on, the whole chunk; ``first`` is the address of ``data``."""
        self._data, self._first, self._at, self._left = data[: start + size], first, min(start, len(data)), 0

    def begin(self, file: Any, start: int, size: int) -> None:
        """Read ``size`` bytes of ``file`` from ``start`` on, in steps, when they are needed."""
        self._file, self._next, self._left = file, start, size
        self._data, self._at = self._own[:0], 0

    def end(self) -> None:
        """Release the file."""
        self._file, self._data, self._at, self._left = None, self._own[:0], 0, 0

    def use(self, count: int) -> None:
        """Drop the first ``count`` bytes, which have been decoded."""
        self._at += count

    def refill(self, wanted: int) -> bool:
        """Read at least ``wanted`` more bytes; return False if the chunk or the file has fewer left."""
        rest = self._data[self._at :]
        more = min(self._left, max(wanted, PAGE_BYTES - len(rest), len(rest)))
        if more < wanted:
            return False
        if len(self._own) < len(rest) + more:
            self._own = np.empty(len(rest) + more, np.uint8)
        self._own[: len(rest)] = rest
        self._data, self._first, self._at = self._own[: len(rest) + more], self._own.ctypes.data, 0
        there = _read(self._file, self._next, self._data[len(rest) :])
        self._next, self._left = self._next + more, self._left - more
        return there == more


def _read(file: Any, start: int, into: NDArray[np.uint8]) -> int:
    """Read bytes of ``file`` from ``start`` on into ``into``; return how many the file had."""
    file.seek(start)
    there: int = file.readinto(into)
    return there


def _at_least(array: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    return array if len(array) >= size else np.empty(size, np.uint8)


# Note [Pages of our own]
#
# Arrow copies each array that petastorm wrote three times: from a page (or into a dictionary), into a builder, and into
# memory that is new to the process and cleared by the kernel. An array of 3 KB takes Arrow 3.0 us of processor time,
# with 1.6 us for decompression. `csrc/pages.cpp` copies once, into memory that is used again, and takes 1.8 us. Rows of
# 20 numbers, for which Arrow's writer uses dictionaries where values fit, take 0.08 us instead of 0.10: the decoder
# unpacks and looks up indices in one pass, for all columns of a row group, without the GIL.
#
# The decoder handles only the usual content of such files: top-level columns without nulls, PLAIN or dictionary
# encoding, pages of both versions, uncompressed or with snappy, and cells with one header. If the footer shows anything
# else in a column chunk, Arrow reads that chunk. If a page shows it, Arrow reads the rest of this row group, and in all
# later row groups the columns that lagom decoded in this one. So Arrow alone raises errors, also for files that cannot
# be read. The decoder checks page headers as Thrift requires, and sizes, counts and indices against the bytes present:
# a damaged file gives the rows that Arrow gives, or Arrow's error.
