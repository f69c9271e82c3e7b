"""``count_rows``, ``count_samples``: the number of rows in a batch."""

from __future__ import annotations

from typing import Any

from lagom.inspection.reads import is_tensor, mapped_values, read_attribute

_MAX_DEPTH = 64
"""Depth to which a batch is searched, which may be a list in itself."""


def count_samples(data: Any) -> int:
    """Return the number of rows of the first tensor or array in ``data`` that has rows; 1 if there is none."""
    count = count_rows(data)
    return 1 if count is None else count


def count_rows(data: Any, depth: int = _MAX_DEPTH) -> int | None:
    """Return the number of rows of the first tensor or array in ``data`` that has rows; None if there is none."""
    if is_tensor(data):
        return data.size(0) if data.dim() else None  # nested tensors have no len()
    kind = type(data)
    if issubclass(kind, (list, tuple)):
        parts = list((list if issubclass(kind, list) else tuple).__iter__(data))
        if kind is list and parts and issubclass(type(parts[0]), (str, bytes)):
            return None  # a list of texts is a column of the batch, which has no rows to count here
    else:
        parts = list(mapped_values(data))
        shape = None if parts else read_attribute(data, "shape")
        if issubclass(type(shape), tuple) and shape:
            return int(shape[0])
    counts = (count_rows(part, depth - 1) for part in parts if depth)
    return next((count for count in counts if count is not None), None)
