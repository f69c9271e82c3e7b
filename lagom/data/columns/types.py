"""Arrow's types: which are numbers, lists, texts or vectors, and what numpy type they become.

``tensor_columns.leaves`` refuses all others, ``lists.dense`` converts.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def plain(kind: Any) -> Any:
    """The type of the values that a dictionary or an extension type stands for."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def innermost(kind: Any) -> Any:
    """The type in a list of lists."""
    while is_list(kind):
        kind = plain(kind.value_type)
    return kind


def is_list(kind: Any) -> bool:
    """Whether it is a list of any kind that Parquet gives."""
    import pyarrow.types as t

    return bool(is_ragged(kind) or t.is_fixed_size_list(kind))


def is_ragged(kind: Any) -> bool:
    """Whether it is a list whose length the type does not say."""
    import pyarrow.types as t

    return bool(t.is_list(kind) or t.is_large_list(kind))


def is_string(kind: Any) -> bool:
    """Whether it is text."""
    import pyarrow.types as t

    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def is_text(kind: Any) -> bool:
    """Whether it is text or bytes."""
    import pyarrow.types as t

    is_bytes = t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind)
    return is_string(kind) or bool(is_bytes)


def is_float(kind: Any) -> bool:
    """Whether it becomes a float."""
    import pyarrow.types as t

    return bool(t.is_floating(kind) or t.is_decimal(kind))


def is_number(kind: Any) -> bool:
    """Whether it is one number: an integer, a float, a decimal, a boolean, or a time."""
    import pyarrow.types as t

    is_time = t.is_date(kind) or t.is_time(kind) or t.is_timestamp(kind) or t.is_duration(kind)
    return bool(t.is_integer(kind) or is_float(kind) or t.is_boolean(kind) or is_time)


def is_vector(kind: Any) -> bool:
    """Whether this is a vector of Spark's ML."""
    import pyarrow.types as t

    return bool(t.is_struct(kind)) and [inner.name for inner in kind] == ["type", "size", "indices", "values"]


def numpy_type(kind: Any) -> np.dtype[Any]:
    """What numbers of an Arrow type become: themselves, where torch can compute with them.

    Decimals become float64; dates and times the integers that stand for them, in the unit of their type.
    """
    import pyarrow.types as t

    if t.is_decimal(kind):
        return np.dtype(np.float64)
    if t.is_temporal(kind):
        return np.dtype(np.int32 if kind.bit_width == 32 else np.int64)
    wider = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
    found: np.dtype[Any] = np.dtype(wider.get(str(kind), kind.to_pandas_dtype()))
    return found


@functools.lru_cache(maxsize=1024)
def as_stored(kind: Any) -> np.dtype[Any] | None:
    """What numpy calls numbers that are in memory as torch computes with them; None for other types."""
    import pyarrow.types as t

    if not (t.is_integer(kind) or t.is_floating(kind)):
        return None
    found = numpy_type(kind)
    return found if found == kind.to_pandas_dtype() else None


def width(kind: Any) -> int:
    """Bytes of a row, as far as the type says."""
    import pyarrow.types as t

    kind = plain(kind)
    if t.is_fixed_size_list(kind):
        return int(kind.list_size) * width(kind.value_type)
    if t.is_struct(kind):
        return sum(width(inner.type) for inner in kind)
    return numpy_type(kind).itemsize if is_number(kind) else 0
