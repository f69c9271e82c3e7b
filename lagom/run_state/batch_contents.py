"""``tensors``, ``count_rows``: what batches, arguments and outputs hold, however nested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lagom.inspection.reads import is_tensor, mapped_values, read_attribute

_MAX_DEPTH = 64
"""Depth to which a batch is searched, which may be a list in itself."""

_NO_MAPPINGS = (int, float, str, type(None))
"""Usual types that are not mappings: this test is ten times faster than the test for Mapping, an abstract class."""


def tensors(data: Any) -> list[torch.Tensor]:
    """Return the tensors in ``data``: a tensor, or lists, tuples and values of mappings, nested to any depth.

    Named tuples and ``UserDict`` are searched. Other objects are not, even if they hold tensors.
    """
    if is_tensor(data):
        return [data]
    found: list[torch.Tensor] = []
    _collect((data,), found, set())
    return found


def _collect(parts: Iterable[Any], found: list[torch.Tensor], around: set[int]) -> None:
    """Collect the tensors of ``parts``; ``around`` has the ids of the containers that they are in."""
    for part in parts:
        kind = type(part)  # isinstance() would ask the object, too
        if issubclass(kind, torch.Tensor):
            found.append(part)
        elif not issubclass(kind, _NO_MAPPINGS) and id(part) not in around:
            inner = around | {id(part)}
            if issubclass(kind, tuple):
                _collect(tuple.__iter__(part), found, inner)
            elif issubclass(kind, list):
                _collect(list.__iter__(part), found, inner)
            else:
                _collect(mapped_values(part), found, inner)


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
