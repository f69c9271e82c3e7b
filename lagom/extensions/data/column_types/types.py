"""Classifies Arrow's types as numbers, lists, texts or vectors, and gives their numpy types.

``can_be_tensor`` says which types are refused; ``lists.dense`` converts.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(kind: Any) -> Any:
    """Return the type of the values of a dictionary or extension type; other types are returned unchanged."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def innermost(kind: Any) -> Any:
    """Return the type of the elements, through any depth of lists."""
    while is_list(kind):
        kind = plain(kind.value_type)
    return kind


def is_list(kind: Any) -> bool:
    """Return whether ``kind`` is a list type, of variable or fixed size."""
    import pyarrow.types as t

    return bool(is_ragged(kind) or t.is_fixed_size_list(kind))


def is_ragged(kind: Any) -> bool:
    """Return whether ``kind`` is a list type of variable length."""
    import pyarrow.types as t

    return bool(t.is_list(kind) or t.is_large_list(kind))


def is_string(kind: Any) -> bool:
    """Return whether ``kind`` is a text type."""
    import pyarrow.types as t

    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def is_text(kind: Any) -> bool:
    """Return whether ``kind`` is a type of text or bytes."""
    import pyarrow.types as t

    is_bytes = t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind)
    return is_string(kind) or bool(is_bytes)


def is_float(kind: Any) -> bool:
    """Return whether numbers of ``kind`` become floats: floats and decimals."""
    import pyarrow.types as t

    return bool(t.is_floating(kind) or t.is_decimal(kind))


def is_number(kind: Any) -> bool:
    """Return whether values of ``kind`` become one number: integers, floats, decimals, booleans, dates and times."""
    import pyarrow.types as t

    is_time = t.is_date(kind) or t.is_time(kind) or t.is_timestamp(kind) or t.is_duration(kind)
    return bool(t.is_integer(kind) or is_float(kind) or t.is_boolean(kind) or is_time)


def is_plain_number(kind: Any) -> bool:
    """Return whether numpy has numbers of ``kind``, or they have no type of their own in numpy: times and durations."""
    import pyarrow.types as t

    return is_number(kind) and not (t.is_decimal(kind) or t.is_date(kind) or t.is_timestamp(kind))


def can_be_tensor(kind: Any) -> bool:
    """Return whether a column of ``kind`` can be an entry of a batch: numbers, lists of numbers, strings and bytes.

    Except for structs and Spark ML's vectors, ``tensor_columns.column_entries`` refuses all other types.
    """
    return is_text(kind) or is_number(innermost(kind))


def is_vector(kind: Any) -> bool:
    """Return whether ``kind`` is the struct that Spark ML writes for vectors."""
    import pyarrow.types as t

    return bool(t.is_struct(kind)) and [inner.name for inner in kind] == ["type", "size", "indices", "values"]


def numpy_type(kind: Any, *, is_own: bool = False) -> np.dtype[Any]:
    """Return the numpy type for numbers of an Arrow type: the same, or a wider type that torch can compute with.

    Decimals become float64. Dates and times become integers, in the unit of their type.

    Args:
        is_own: whether unsigned integers keep their type.
    """
    import pyarrow.types as t

    if t.is_decimal(kind):
        return np.dtype(np.float64)
    if t.is_temporal(kind):
        return np.dtype(np.int32 if kind.bit_width == 32 else np.int64)
    wider = {} if is_own else {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
    dtype: np.dtype[Any] = np.dtype(wider.get(str(kind), kind.to_pandas_dtype()))
    return dtype


def width(kind: Any) -> int:
    """Return the bytes of a row as far as the type determines them; 0 for texts and lists of variable length."""
    import pyarrow.types as t

    kind = plain(kind)
    if t.is_fixed_size_list(kind):
        return int(kind.list_size) * width(kind.value_type)
    if t.is_struct(kind):
        return sum(width(inner.type) for inner in kind)
    return numpy_type(kind).itemsize if is_number(kind) else 0
