"""``tensors``: finds the tensors in nested batches, arguments and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lagom.inspection.reads import is_tensor, mapped_values

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
