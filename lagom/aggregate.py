"""From what every rank returned to the one value that one machine would have returned."""

from __future__ import annotations

import logging
import numbers
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

_log = logging.getLogger("lagom")


def aggregate(values: Sequence[Any], samples: Sequence[int]) -> Any:
    """One value for all ranks.

    Equal on all ranks: returned as rank 0 returned it. Otherwise, for numbers, arrays and tensors of numbers and for
    dicts of these: the mean weighted by ``samples``, the number each rank trained on, with a warning. Else rank 0's.
    """
    if all(_equal(values[0], value) for value in values[1:]):
        return values[0]
    weights = [count / sum(samples) for count in samples] if sum(samples) else [1 / len(values)] * len(values)
    mean, averaged = _mean(values, weights)
    _log.warning(
        "the ranks returned different values (%s); taking %s. result.per_rank has all of them",
        ", ".join(_short(value) for value in values[:4]) + (", ..." if len(values) > 4 else ""),
        "their mean, weighted by the samples each rank trained on" if averaged else "rank 0's",
    )
    return mean


def _equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    if _is_tensor(left):
        return _equal_arrays(left.detach(), right.detach())
    if _is_array(left):
        return _equal_arrays(left, right)
    compare: Any = type(left).__eq__
    if compare is object.__eq__:
        return _equal_states(left, right)
    try:
        if left == right or (left != left and right != right):  # or both are NaN
            return True
    except Exception:  # a foreign __eq__ may do anything, such as give an array
        if left is right:
            return True
    return _compares_fields(left) and _equal(vars(left), vars(right))


def _compares_fields(value: Any) -> bool:
    """Whether it compares what it holds with ``==``, which arrays and modules do not answer as is meant here."""
    made = getattr(type(value), "__dataclass_params__", None)
    return hasattr(value, "__dict__") and (isinstance(value, SimpleNamespace) or (made is not None and made.eq))


def _equal_states(left: Any, right: Any) -> bool:
    """Whether two objects that compare by identity hold the same, as far as they say: a module by its state."""
    if not callable(getattr(left, "state_dict", None)):
        return True
    try:
        return _equal(left.state_dict(), right.state_dict())
    except Exception:  # a foreign state_dict may do anything
        return True


def _equal_arrays(left: Any, right: Any) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    same = left == right
    if _is_number_dtype(left) or str(left.dtype).startswith(("datetime64", "timedelta64")):
        same = same | ((left != left) & (right != right))
    return bool(same.all())


def _mean(values: Sequence[Any], weights: Sequence[float]) -> tuple[Any, bool]:
    """The weighted mean and True, or rank 0's value and False when there is no such thing."""
    first = values[0]
    if all(_equal(first, value) for value in values[1:]):
        return first, True
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        means = {key: _mean([value[key] for value in values], weights) for key in first}
        return {key: mean for key, (mean, _) in means.items()}, all(averaged for _, averaged in means.values())
    # 0 times NaN is NaN: who has no weight has no say.
    weighted = [(weight, value) for weight, value in zip(weights, values, strict=True) if weight]
    if all(_is_number(value) for value in values):
        return sum(weight * value for weight, value in weighted), True
    if _averages(first) and all(
        type(value) is type(first) and value.shape == first.shape and _averages(value) for value in values
    ):
        return sum(weight * (value.detach() if _is_tensor(value) else value) for weight, value in weighted), True
    return first, False


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _averages(value: Any) -> bool:
    return (_is_tensor(value) or _is_array(value)) and _is_number_dtype(value)


def _is_number_dtype(value: Any) -> bool:
    if _is_tensor(value):
        return str(value.dtype) != "torch.bool"
    return value.dtype.kind in "iufc"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign __repr__ may do anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 40 else text[:39] + "…"
