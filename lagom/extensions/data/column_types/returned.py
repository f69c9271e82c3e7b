"""``computable``: converts a value that the function of a transform returned to what a batch has for its column."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np

from lagom.extensions.data.column_types import petastorm_codecs


class NullError(ValueError):
    """Raised for None, and for a date or time that is missing (NaT)."""


def computable(value: Any) -> Any:
    """Return ``value`` in a type that torch computes with; texts, tensors and Python's numbers are returned unchanged.

    Decimals become float64, dates, times and durations integers in the unit of their type, and unsigned integers wider.

    Raises:
        NullError: for a null.
        ValueError: for an array of texts or of other objects, and a uint64 that does not fit into int64.
    """
    if value is None:
        raise NullError
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytes):
        return bytes(value)  # numpy's bytes too, of which ``item`` would cut zeros at the end
    if isinstance(value, (datetime.date, datetime.timedelta)):
        value = _of_numpy(value)
    return _numbers(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _of_numpy(value: Any) -> Any:
    """Return a date, time or duration of Python or pandas as numpy's."""
    for convert in ("to_datetime64", "to_timedelta64"):
        if hasattr(value, convert):  # pandas keeps the unit, and NaT
            return getattr(value, convert)()
    if isinstance(value, datetime.timedelta):
        return np.timedelta64(value, "us")
    if not isinstance(value, datetime.datetime):
        return np.datetime64(value, "D")
    if value.tzinfo is not None:
        value = value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    return np.datetime64(value, "us")


def _numbers(value: Any) -> Any:
    kind = value.dtype.kind
    if kind in "US" and not value.ndim:
        return value.item()
    if kind == "O":
        cells = [computable(cell) for cell in value.ravel()]
        made = np.array(cells) if cells else np.empty(0)
        if made.dtype.kind in "biuf" and made.ndim == 1:
            return made.reshape(value.shape)
    if kind in "USO":
        raise ValueError(
            "it is an array of texts or other objects, which cannot be a tensor; have the function convert or drop it, "
            "or pass a collate_fn="
        )
    if kind in "mM":
        if np.isnat(value).any():
            raise NullError
        is_day = kind == "M" and np.datetime_data(value.dtype)[0] == "D"
        return value.astype(np.int64).astype(np.int32 if is_day else np.int64)
    if kind == "u":
        return petastorm_codecs.widened(value, value.dtype)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
