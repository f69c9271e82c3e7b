"""Converts Arrow's numbers and lists of numbers to numpy arrays, from whole buffers instead of row by row."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lagom.extensions.data.column_types.types import is_list, is_ragged, numpy_type, plain


class RowError(Exception):
    """Raised for a row that cannot be converted.

    Args:
        row: index of the row in the array.
        why: the reason, for the user.
    """

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


def dense(
    array: Any, kind: Any, fill: int | float, *, strict: bool, depth: int = 0, is_own: bool = False
) -> NDArray[Any]:
    """Return the rows of an Arrow array as one numpy array of shape ``(rows, ...)``, with ``fill`` for nulls.

    Args:
        kind: Arrow's type of the rows.
        strict: whether a null inside a list is an error. The caller checks nulls at the top.
        depth: number of lists around ``array``.
        is_own: whether unsigned integers keep their type.

    Raises:
        RowError: for the first row with a list of another length, or with a null that ``strict`` forbids.
    """
    import pyarrow as pa

    kind = plain(kind)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if strict and depth and array.null_count:
        row = int(np.argmin(array.is_valid().to_numpy(zero_copy_only=False)))
        raise RowError(row, _INNER_NULL)
    if is_list(kind):
        return _dense_lists(array, kind, fill, strict=strict, depth=depth, is_own=is_own)
    wanted = numpy_type(kind, is_own=is_own)
    if pa.types.is_temporal(kind):
        array = array.view(pa.from_numpy_dtype(wanted))
    elif pa.types.is_decimal(kind):
        array = _of_decimals(array)
    elif not pa.types.is_boolean(kind) and array.type != pa.from_numpy_dtype(wanted):
        array = array.cast(pa.from_numpy_dtype(wanted))
    if array.null_count:
        array = array.fill_null(pa.scalar(fill).cast(array.type))
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if not values.flags.writeable and values.dtype == wanted and values.ndim == 1 and len(values):
        values = view(array, wanted)
    return values


def _of_decimals(array: Any) -> Any:
    """Convert decimals to the nearest float64, as Python and Spark do; Arrow's own cast may be off by one bit."""
    import pyarrow as pa

    kind = array.type
    if not pa.types.is_decimal128(kind) or kind.precision > 15 or not 0 <= kind.scale <= 22:
        return array.cast(pa.string()).cast(pa.float64())
    # With up to 15 digits, dividend and divisor are exact, so only the quotient is rounded.
    low = np.frombuffer(array.buffers()[1], "<i8", 2 * len(array), 16 * array.offset)[::2]
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    return pa.array(low / 10.0**kind.scale, mask=None if valid is None else ~valid)


def view(array: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a numpy view of an Arrow array of numbers, which is writable if Arrow's buffer is mutable."""
    values = array.buffers()[1]
    return np.frombuffer(values, dtype, len(array), array.offset * dtype.itemsize)


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` if it is writable, else a copy."""
    return array if array.flags.writeable else array.copy()


def _dense_lists(array: Any, kind: Any, fill: int | float, *, strict: bool, depth: int, is_own: bool) -> NDArray[Any]:
    count = len(array)
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    length = _one_length(array, kind, valid)
    try:
        inner = dense(array.flatten(), kind.value_type, fill, strict=strict, depth=depth + 1, is_own=is_own)
    except RowError as error:
        row = error.row // max(length, 1)
        raise RowError(row if valid is None else int(np.flatnonzero(valid)[row]), str(error)) from None
    shape = inner.shape[1:]
    if valid is None:
        return inner.reshape(count, length, *shape)
    out = np.full((count, length, *shape), fill, inner.dtype)
    out[valid] = inner.reshape(int(valid.sum()), length, *shape)
    return out


def _one_length(array: Any, kind: Any, valid: NDArray[np.bool_] | None) -> int:
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size)
    lengths = np.diff(np.asarray(array.offsets))
    if valid is not None:
        lengths = lengths[valid]
    if not len(lengths):
        return 0
    first = int(lengths[0])
    if (lengths != first).any():
        row = int(np.argmax(lengths != first))
        raise RowError(
            row if valid is None else int(np.flatnonzero(valid)[row]),
            f"a list of {lengths[row]} where others have {first}; {RAGGED_CHOICES}",
        )
    return first


_INNER_NULL = 'a null inside of a list; nulls= may be a number to put there, or "nan" (floats)'
RAGGED_CHOICES = 'ragged= may be "pad" (with zeros, to the longest of a batch) or "list" (a list of tensors)'


def vectors(array: Any) -> NDArray[np.float64]:
    """Return vectors of Spark ML, dense and sparse, as one array of shape ``(rows, size)``, with zeros for nulls.

    Raises:
        RowError: for the first vector of another size.
    """
    import pyarrow.compute as pc

    count = len(array)
    kinds, sizes, indices, values = (pc.struct_field(array, name) for name in ("type", "size", "indices", "values"))
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    is_dense = kinds.fill_null(1).to_numpy(zero_copy_only=False) == 1
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    all_sizes = np.where(is_dense, lengths, sizes.fill_null(0).to_numpy(zero_copy_only=False))
    size = int(all_sizes[valid][0]) if valid.any() else 0
    if (all_sizes[valid] != size).any():
        row = int(np.flatnonzero(valid & (all_sizes != size))[0])
        raise RowError(row, f"a vector of {all_sizes[row]} where others have {size}")
    rows = np.repeat(np.arange(count), lengths)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    columns[~is_dense[rows]] = indices.flatten().to_numpy(zero_copy_only=False)
    out = np.zeros((count, size))
    out[rows, columns] = values.flatten().to_numpy(zero_copy_only=False)
    return out


def filled(array: Any, fill: int | float) -> Any:
    """Return an Arrow array with ``fill`` for nulls, also inside of lists; a list that is null becomes empty.

    Raises:
        ValueError: if the type of ``array`` cannot hold ``fill``.
    """
    import pyarrow as pa

    if not array.null_count and not is_list(array.type):
        return array
    if not is_ragged(array.type):
        value = Decimal(repr(fill)) if pa.types.is_decimal(array.type) else fill
        return array.fill_null(pa.scalar(value).cast(array.type))
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    starts = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    return pa.LargeListArray.from_arrays(starts, filled(array.flatten(), fill))


def check_inner_nulls(array: Any) -> None:
    """Check that no list of an Arrow array contains a null.

    Raises:
        RowError: for the first row with such a list.
    """
    import pyarrow.compute as pc

    rows = None
    while is_list(array.type):
        parents = pc.list_parent_indices(array)
        rows, array = parents if rows is None else rows.take(parents), array.flatten()
        if array.null_count:
            row = rows[int(np.argmin(array.is_valid().to_numpy(zero_copy_only=False)))].as_py()
            raise RowError(row, _INNER_NULL)


def objects(array: Any) -> list[Any]:
    """Return the values of an Arrow array: numpy arrays for lists, Python's objects for others, and None for nulls."""
    if is_list(array.type):
        return list(array.to_pandas())
    found: list[Any] = array.to_pylist()
    return found


def tensors(array: Any) -> list[torch.Tensor]:
    """Return a tensor for each list of numbers."""
    values = torch.from_numpy(array.flatten().to_numpy(zero_copy_only=False).copy())
    return list(torch.split(values, np.diff(np.asarray(array.offsets)).tolist()))


def padded(array: Any) -> torch.Tensor:
    """Return lists of numbers as one tensor of shape ``(rows, longest)``, with zeros after the shorter lists."""
    lengths = np.diff(np.asarray(array.offsets))
    values = array.flatten().to_numpy(zero_copy_only=False)
    out = np.zeros((len(array), int(lengths.max(initial=0))), values.dtype)
    out[np.arange(out.shape[1]) < lengths[:, None]] = values
    return torch.from_numpy(out)
