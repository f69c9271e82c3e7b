"""Columns of data: checked by name, set to one value, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lagom.settings import nearest

Feature = str | int
_MANY = 12


def check_feature(feature: Feature, columns: Sequence[Feature], where: str) -> None:
    """Check that ``feature`` is one of ``columns``.

    Args:
        where: kind of the data, for the error's text.

    Raises:
        ValueError: if it is not, with the nearest name.
    """
    if feature in columns:
        return
    names = [one for one in columns if isinstance(one, str)]
    listed = ", ".join(map(repr, columns[:_MANY])) + (", ..." if len(columns) > _MANY else "")
    hint = nearest(feature, names) if isinstance(feature, str) else ""
    if isinstance(feature, str) and not names and columns:
        hint = "; name its columns by AblationStudy(feature_names=[...]), or use their numbers"
    raise ValueError(f"the {where} has no feature {feature!r}{hint or f'; it has {listed}'}")


def is_array(value: object) -> bool:
    """Return whether ``value`` is a tensor or an array of numpy's."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def with_columns(array: Any, constants: dict[int, Any], axis: int) -> Any:
    """Return a copy of ``array`` with one value in each of the columns ``constants`` along ``axis``."""
    found = array.clone() if isinstance(array, torch.Tensor) else array.copy()
    for number, value in constants.items():
        found[(slice(None),) * axis + (number,)] = value
    return found


def without_columns(array: Any, numbers: Sequence[int], axis: int) -> Any:
    """Return ``array`` without the columns ``numbers`` along ``axis``."""
    kept = [number for number in range(array.shape[axis]) if number not in numbers]
    return array[(slice(None),) * axis + (kept,)]


def constant(old: Any, value: Any) -> Any:
    """Return the value that replaces ``old``; if ``value`` is None, zeros of the type and shape of ``old``.

    Otherwise tensors and arrays keep their shape, lists their lengths, and have ``value`` everywhere; all else becomes
    ``value``.

    Raises:
        ValueError: if ``value`` is None and there is no zero of that type.
    """
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, 0 if value is None else value)
    if isinstance(old, np.ndarray) and old.dtype.kind in "biufc":
        return np.full_like(old, 0 if value is None else value)
    if isinstance(old, (list, tuple)) and value is None:
        return type(old)(constant(one, None) for one in old)
    if isinstance(old, np.ndarray) and value is not None:
        return np.full(old.shape, value, old.dtype)
    if isinstance(old, list):
        return [value if isinstance(value, (list, tuple)) else constant(one, value) for one in old]
    if value is not None or old is None:
        return value
    if isinstance(old, (bool, int, float, str, bytes, np.generic)):
        return type(old)()
    raise ValueError(f"there is no zero for a {type(old).__name__}; say what stands in its place: value=...")
