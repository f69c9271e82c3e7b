"""``tensors``: finds the tensors in nested batches, arguments and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_NO_MAPPINGS = (int, float, str, type(None))
"""Usual types that are not mappings: this test is ten times faster than the test for Mapping, an abstract class."""


def tensors(data: Any) -> list[torch.Tensor]:
    """Return the tensors in ``data``: a tensor, or lists, tuples and values of mappings, nested to any depth.

    Named tuples and ``UserDict`` are searched. Other objects are not, even if they hold tensors.
    """
    if isinstance(data, torch.Tensor):
        return [data]
    found: list[torch.Tensor] = []
    _collect((data,), found)
    return found


def _collect(parts: Iterable[Any], found: list[torch.Tensor]) -> None:
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            _collect(part, found)
        elif not isinstance(part, _NO_MAPPINGS) and isinstance(part, Mapping):
            _collect(part.values(), found)
