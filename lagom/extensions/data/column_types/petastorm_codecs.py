"""Decodes cells that petastorm encoded: arrays in numpy's file format, compressed arrays, and images."""

from __future__ import annotations

import io
import math
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lagom.errors import LagomError
from lagom.extensions.data.column_types import images, lists
from lagom.extensions.data.column_types.encoded_cells import CellColumn, Encoded
from lagom.extensions.data.column_types.values import Dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.reused_arrays import ReusedArrays
    from lagom.extensions.data.column_types.tensor_columns import Codec, Where
    from lagom.extensions.data.column_types.unischema import UnischemaField
    from lagom.extensions.data.column_types.values import Path, Values

_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.uint32): np.dtype(np.int64),
    np.dtype(np.uint64): np.dtype(np.int64),
}
_HEADER = re.compile(rb"\{'descr': '([<>|][biufc]\d+)', 'fortran_order': (False|True), 'shape': \(([\d, ]*)\), \} *\n")
"""Header that ``numpy.save`` writes before the numbers, without its first bytes."""
_ARRAY_CODECS = ("NdarrayCodec", "CompressedNdarrayCodec")
_CELLS, _BYTES = 8, 64 << 10
"""A further thread pays if it decodes at least this many cells, or this many bytes of encoded cells."""


def codec(field: UnischemaField, ragged: str, *, is_own: bool = False) -> Codec | None:
    """Return the codec for the cells of ``field``; None if Arrow's type is enough to convert them.

    Args:
        is_own: whether values keep the types of petastorm's schema, for a function; otherwise they get types that torch
            computes with.

    Raises:
        ValueError: for arrays that are no numbers, unless ``is_own``.
    """
    is_number = field.dtype is not None and field.dtype.kind in "biuf"
    if field.codec in _ARRAY_CODECS and not is_number and not is_own:
        raise ValueError(
            f"column {field.name!r} has arrays of {_told(field.dtype)}, which cannot be a tensor; leave it out "
            "(schema_fields=, columns=), or have the function of a transform_spec convert or drop it"
        )
    if field.codec == "NdarrayCodec":
        return NumpySaved(field, ragged, is_own)
    if field.codec == "CompressedNdarrayCodec":
        return CellByCell(field, ragged, _unzipped, is_own)
    if field.codec == "CompressedImageCodec":
        return CellByCell(field, ragged, images.decode, is_own)
    if field.shape == () and field.dtype is not None and is_number:
        return Scalar(field.dtype, is_own)
    return None


def _told(dtype: np.dtype[Any] | None) -> str:
    return {"U": "texts", "S": "bytes"}.get("" if dtype is None else dtype.kind, str(dtype))


def cells_for_function(field: UnischemaField | None) -> Callable[[Any], list[Any]]:
    """Return the function that makes a list of the cells of an Arrow array, as petastorm passes them to a transform."""
    if field is None or field.codec in _ARRAY_CODECS or field.shape != ():
        return lists.objects
    return partial(_scalars, Decimal if field.dtype is None else field.dtype.type)


def _scalars(kind: Callable[[Any], Any], array: Any) -> list[Any]:
    import pyarrow as pa

    if not pa.types.is_timestamp(array.type):
        return [None if value is None else kind(value) for value in array.to_pylist()]
    found = array.cast(pa.timestamp("us", array.type.tz), safe=False).cast(pa.timestamp("us")).to_numpy(False)
    return [value if valid else None for value, valid in zip(found, array.is_valid().to_pylist(), strict=True)]


@dataclass(frozen=True)
class Scalar:
    """Converts a plain column of numbers to the type in petastorm's schema."""

    dtype: np.dtype[Any]
    is_own: bool = False

    def convert(self, array: Any, path: Path, where: Where) -> Values:
        """Return the numbers in the schema's type, or in a wider type that torch can compute with, unless ``is_own``.

        Raises:
            DataError: for a number that the schema's type cannot hold.
        """
        found = lists.dense(array, array.type, 0, strict=False, is_own=self.is_own)
        wanted = self.dtype if self.is_own else computable(self.dtype)
        made = found.astype(self.dtype) if _may_change(found.dtype, self.dtype) else found
        if made is not found and (changed := made != found).any():
            row = int(np.argmax(changed))
            raise where.error(path, row, f"{found[row]} does not fit into {self.dtype}, which petastorm's schema has")
        return Dense(lists.writable(made.astype(wanted, copy=False)))


@dataclass(frozen=True)
class NumpySaved:
    """Decodes arrays in the format of ``numpy.save``."""

    field: UnischemaField
    ragged: str
    is_own: bool = False

    def convert(self, array: Any, path: Path, where: Where) -> Values:
        """Return one array for all rows, or one for each row if the field's shape differs from row to row.

        One array is made without a loop over rows if all headers are equal and no row is null.

        Raises:
            DataError: for a cell that is no saved array, or does not fit the field.
        """
        ragged = None in self.field.shape or self.field.dtype is None or self.field.dtype.kind not in "biuf"
        if not ragged and not array.null_count:
            whole = _alike(_Buffers(array), self.field, where.memory, self.is_own)
            if whole is not None:
                return Dense(whole)

        def one(row: int) -> NDArray[Any] | None:
            try:
                cell = array[row].as_buffer() if array[row].is_valid else None
                return None if cell is None else _checked(_saved(cell), self.field, self.is_own)
            except Exception as error:  # numpy raises many kinds of errors for damaged bytes
                raise where.error(path, row, f"is no array as NdarrayCodec writes it: {error}") from error

        made = [one(row) for row in range(len(array))]
        found = _cells(made, self, path)
        return found if ragged else Dense(found.dense())


@dataclass(frozen=True)
class CellByCell:
    """Keeps cells encoded in the shuffling window, since decoding is slow, and decodes them in threads later."""

    field: UnischemaField
    ragged: str
    decode_one: Callable[[Any], NDArray[Any]]
    is_own: bool = False

    def convert(self, array: Any, path: Path, where: Where) -> Values:
        """Return the encoded cells with their origins."""
        import pyarrow as pa

        return Encoded(array.cast(pa.large_binary()), where.origins(len(array)), Decoder(self, path, where))


@dataclass(frozen=True)
class Decoder:
    """Decodes the cells of one column in several threads."""

    codec: CellByCell
    path: Path
    where: Where

    def __call__(self, array: Any, origins: NDArray[np.int64]) -> CellColumn:
        """Decode the cells in ``array``; ``origins`` has a number for each row, by which ``Where.at`` finds it.

        Raises:
            DataError: for a cell that cannot be decoded.
            LagomError: if no installed package decodes images.
        """

        def one(place: int) -> NDArray[Any] | None:
            cell = array[place].as_buffer() if array[place].is_valid else None
            try:
                return (
                    None if cell is None else _checked(self.codec.decode_one(cell), self.codec.field, self.codec.is_own)
                )
            except LagomError:  # a package is missing
                raise
            except Exception as error:  # decoders raise many kinds of errors for damaged bytes
                told = self.where.at(int(origins[place]))
                why = f"does not decode as {self.codec.field.codec}: {error}"
                raise told.error(self.path, 0, why) from error

        def some(places: range) -> list[NDArray[Any] | None]:
            return [one(place) for place in places]

        # Each thread gets consecutive cells, since handing out one cell takes as long as decoding a small one.
        worth = min(len(array), max(len(array) // _CELLS, array.nbytes // _BYTES))
        threads = max(1, min(torch.get_num_threads(), worth))
        bounds = [len(array) * number // threads for number in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(some, starmap(range, pairwise(bounds))))
        cells = [cell for part in parts for cell in part]
        return _cells(cells, self.codec, self.path)


def computable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return ``dtype``, or the wider type that torch computes with instead."""
    return _WIDER.get(dtype, dtype)


def widened(found: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert ``found`` to the type that torch computes with for ``dtype``, in the machine's byte order.

    Raises:
        ValueError: if an unsigned integer does not fit into int64.
    """
    if not _fits(found):
        raise ValueError(f"{found.max()} does not fit into int64, which torch computes with in place of uint64")
    return found.astype(computable(dtype), copy=False)


def _fits(found: NDArray[Any]) -> bool:
    is_wide = found.dtype.kind == "u" and found.dtype.itemsize == 8
    return not (is_wide and found.size and found.max() >= 1 << 63)


def _may_change(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether a conversion may change numbers by more than rounding."""
    return wanted.kind in "bui" and not np.can_cast(found, wanted)


def _cells(cells: list[NDArray[Any] | None], codec: NumpySaved | CellByCell, path: Path) -> CellColumn:
    field = codec.field
    assert field.dtype is not None
    shape = None if None in field.shape else tuple(size for size in field.shape if size is not None)
    dtype = field.dtype if codec.is_own else computable(field.dtype)
    return CellColumn(cells, codec.ragged, ".".join(path), shape, dtype)


def _misfit(shape: tuple[int, ...], dtype: np.dtype[Any], field: UnischemaField, is_own: bool) -> str | None:
    """Return why an array of ``shape`` and ``dtype`` cannot be a cell of ``field``; None if it can."""
    fits = len(shape) == len(field.shape) and all(
        wanted in (None, size) for size, wanted in zip(shape, field.shape, strict=True)
    )
    if not fits or field.dtype is None or dtype.type is not field.dtype.type:
        return f"{dtype} of shape {shape}, where the schema has {field.dtype} of shape {field.shape}"
    return None if is_own or dtype.kind in "biuf" else f"{dtype} cannot be a tensor"


def _checked(found: NDArray[Any], field: UnischemaField, is_own: bool) -> NDArray[Any]:
    if why := _misfit(found.shape, found.dtype, field, is_own):
        raise ValueError(why)
    assert field.dtype is not None
    return found if is_own else widened(found, field.dtype)


def _saved(cell: Any) -> NDArray[Any]:
    held = bytearray(cell)
    header = read_header(held)
    if header is None or header.dtype.hasobject:
        found: NDArray[Any] = np.load(io.BytesIO(held), allow_pickle=False)  # its error says what is wrong
        return found
    flat = np.frombuffer(held, header.dtype, math.prod(header.shape), header.size)
    return flat.reshape(header.shape, order="F" if header.is_fortran else "C")


def _unzipped(cell: Any) -> NDArray[Any]:
    with zipfile.ZipFile(io.BytesIO(cell)) as opened:
        return _saved(opened.read("arr.npy"))


class Header(NamedTuple):
    """The header that ``numpy.save`` writes before an array."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    size: int
    """Bytes of the header."""


def read_header(cell: bytes | bytearray) -> Header | None:
    """Read the header of a saved array; return None if ``cell`` has no valid header.

    numpy reads a header by Python's parser, which sometimes fails if two threads use it at once ("AST constructor
    recursion depth mismatch", Python 3.11; CPython issue 106905). So headers of numbers are read without that parser.
    """
    head = io.BytesIO(cell)
    try:
        version = np.lib.format.read_magic(head)
        start = head.tell() + (2 if version == (1, 0) else 4)
        size = start + int.from_bytes(cell[head.tell() : start], "little")
        if plain := _HEADER.fullmatch(cell, start, size):
            shape = tuple(map(int, re.findall(rb"\d+", plain[3])))
            return Header(shape, plain[2] == b"True", np.dtype(plain[1].decode()), size)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return Header(*read(head), head.tell())
    except Exception:  # damaged bytes raise many kinds of errors, also those of Python's tokenizer
        return None


class _Buffers:
    """The bytes of a binary Arrow array, and the offset of each cell."""

    def __init__(self, array: Any) -> None:
        import pyarrow as pa

        if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
            array = array.cast(pa.large_binary())
        _, offsets, data = array.buffers()
        width = np.int32 if pa.types.is_binary(array.type) else np.int64
        self.offsets = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        self.data = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


def _alike(cells: _Buffers, field: UnischemaField, memory: ReusedArrays | None, is_own: bool) -> NDArray[Any] | None:
    """Return cells with equal headers as one array; None if headers differ or a cell does not fit ``field`` or int64.

    Args:
        memory: gives memory for a copy; None to return a view.
    """
    lengths = np.diff(cells.offsets)
    if not len(lengths) or (lengths != lengths[0]).any():
        return None
    matrix = cells.data[cells.offsets[0] : cells.offsets[-1]].reshape(len(lengths), int(lengths[0]))
    header = read_header(matrix[0].tobytes())
    if header is None or _misfit(header.shape, header.dtype, field, is_own):
        return None
    shape, is_fortran, dtype, start = header
    size = int(np.prod(shape)) * dtype.itemsize
    if start + size != lengths[0] or (matrix[:, :start] != matrix[0, :start]).any():
        return None
    bare = matrix[:, start:]
    if memory is not None:
        bare = memory.empty((len(lengths), size), np.dtype(np.uint8))
        np.copyto(bare, matrix[:, start:])
    body = bare.view(dtype)
    if is_fortran:
        body = np.ascontiguousarray(body.reshape(len(lengths), *shape[::-1]).transpose(0, *range(len(shape), 0, -1)))
    assert field.dtype is not None
    body = body.reshape(len(lengths), *shape)
    # Both convert to the machine's byte order, if the file has another.
    if is_own:
        return body.astype(field.dtype, copy=False)
    return widened(body, field.dtype) if _fits(body) else None
