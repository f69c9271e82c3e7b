"""``aggregate``: combines the ranks' return values into one value, and warns if they differ."""

from __future__ import annotations

import hashlib
import logging
import numbers
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lagom.contents import entries, is_array, is_metrics, is_plain, is_tensor, name_of, with_parts

_log = logging.getLogger("lagom")
_MOST_SHOWN = 3
_DEEPEST = 100


def aggregate(
    values: Sequence[Any], samples: Sequence[int], remedy: str = "", warn: Callable[[str], None] = _log.warning
) -> Any:
    """Combine the values of all ranks into one.

    A value that is equal on all ranks is returned as rank 0 returned it. Otherwise a warning names the differences, and
    floats become the mean weighted by ``samples``: a float that is the value itself or an item of it, and floats in
    nested dicts, lists, tuples and dataclasses that hold only numbers and texts. Everything else is rank 0's: whole
    numbers and texts; tensors and arrays, since a mean of models is a model that no rank had; nested parts that hold
    more than numbers and texts, such as a checkpoint beside a loss; and parts that differ in type, length or names.

    Args:
        samples: the number of samples that each rank trained on; if all are 0, ranks count alike.
        remedy: end of the warning: why the number is not one process's, and which settings give that number.
        warn: is called with the warning.
    """
    if len(values) < 2 or _have_equal_digests(values):
        return values[0]
    weights = [count / sum(samples) for count in samples] if sum(samples) else [1 / len(values)] * len(values)
    merge = _Merge(weights)
    try:
        value = merge.merged(values, "", 0, is_own=True)
    except Exception as error:  # the program's classes may do anything; that must not lose the result
        _log.warning("the ranks' values cannot be compared (%s: %s); taking rank 0's", type(error).__name__, error)
        return values[0]
    if merge.differences:
        warn(_warning(merge.differences, remedy))
    return value


def remedy(batches: str, evaluation: str) -> str:
    """Return a text for a value that differs between ranks: settings that give one process's value, or the cause."""
    changes = ['batches="whole"'] * (batches != "whole") + ['evaluation="gathered"'] * (evaluation == "sharded")
    if changes:
        return f"This is not one process's number: {' and '.join(changes)} gives that. "
    return (
        "This is not one process's number: it comes from something that each rank has of its own, such as a clock, "
        "an unseeded generator or lagom.rank(). "
    )


@dataclass(frozen=True, slots=True)
class _Difference:
    place: str
    values: Sequence[Any]
    averaged: bool


class _Merge:
    """Compares the ranks' values part by part, and combines them into one."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.differences: list[_Difference] = []
        self._weights = weights
        self._merged: dict[tuple[int, ...], Any] = {}  # a value may contain itself

    def merged(self, values: Sequence[Any], place: str, depth: int, *, is_own: bool) -> Any:
        """Return one value for ``values``; floats are averaged only with ``is_own``."""
        first = values[0]
        if _are_numbers(values):
            return first if all(_equal(first, one) for one in values[1:]) else self._mean(values, place, is_own)
        if not all(_are_alike(first, one) for one in values) or depth > _DEEPEST:
            return self._differ(values, place)
        if _say_equal(values):
            return first
        parts = [entries(one) for one in values]
        if parts[0] is None:
            return first if all(_equal(first, one) for one in values[1:]) else self._differ(values, place)
        names = [[name for name, _ in each or ()] for each in parts]
        if any(each != names[0] for each in names) or len({_shape(one) for one in values}) > 1:
            return self._differ(values, place)
        key = tuple(map(id, values))
        if key not in self._merged:
            self._merged[key], num_before = first, len(self.differences)
            columns = list(zip(*([part for _, part in each or ()] for each in parts), strict=True))
            is_own = is_own and is_plain(first) and (depth == 0 or is_metrics(first))
            made = [
                self.merged(column, place + name, depth + 1, is_own=is_own)
                for name, column in zip(names[0], columns, strict=True)
            ]
            if is_own and any(one is not column[0] for one, column in zip(made, columns, strict=True)):
                self._merged[key] = with_parts(first, made)
            # A part without a name, such as an item of a set, differs: report the whole container instead.
            if any(one.place == place for one in self.differences[num_before:]):
                self.differences[num_before:] = [_Difference(place, values, averaged=False)]
        return self._merged[key]

    def _mean(self, values: Sequence[Any], place: str, is_own: bool) -> Any:
        if not is_own or not any(_is_float(one) for one in values):
            return self._differ(values, place)
        self.differences.append(_Difference(place, values, averaged=True))
        # 0 times NaN is NaN: leave out values without weight.
        return sum(weight * one for weight, one in zip(self._weights, values, strict=True) if weight)

    def _differ(self, values: Sequence[Any], place: str) -> Any:
        self.differences.append(_Difference(place, values, averaged=False))
        return values[0]


def _warning(differences: Sequence[_Difference], remedy: str) -> str:
    shown = ", ".join(f"{one.place} {_shown(one.values)}".strip() for one in differences[:_MOST_SHOWN])
    more = f" and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
    means = "their mean, weighted by the samples each rank trained on"
    kinds = {one.averaged for one in differences}
    taken = f"of floats {means}, else rank 0's" if len(kinds) > 1 else means if True in kinds else "rank 0's"
    return f"the ranks returned different values: {shown}{more}; taking {taken}. {remedy}".rstrip()


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(one, numbers.Real) and not isinstance(one, bool) for one in values)


def _is_float(value: Any) -> bool:
    return not isinstance(value, numbers.Rational)


def _say_equal(values: Sequence[Any]) -> bool:
    """Return whether the class's own ``__eq__`` says that all are equal; False for builtins and tensors."""
    first, compare = values[0], vars(object)["__eq__"]
    if type(first).__module__ == "builtins" or type(first).__eq__ is compare or is_tensor(first):
        return False
    try:
        return all((first == one) is True for one in values[1:])
    except Exception:  # the program's __eq__ may do anything, such as return an array
        return False


def _are_alike(left: Any, right: Any) -> bool:
    """Return whether two values are of one class, by name: a class that the function defines differs on each rank."""
    one, other = type(left), type(right)
    return one is other or (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _equal(left: Any, right: Any) -> bool:
    """Return whether two values without parts are equal; two that cannot be examined count as equal."""
    if not _are_alike(left, right):
        return False
    if is_tensor(left) or is_array(left):
        return _equal_arrays(left, right)
    if isinstance(left, (numbers.Number, str, bytes, bytearray)) or type(left).__module__ == "numpy":
        return bool(left == right) or bool(left != left and right != right)  # or both are NaN
    return name_of(left) == name_of(right)


def _equal_arrays(left: Any, right: Any) -> bool:
    if _shape(left) != _shape(right):
        return False
    try:
        if is_tensor(left):
            left, right = left.detach(), right.detach()
            if str(left.layout) != "torch.strided":
                left, right = left.to_dense(), right.to_dense()
        same = left == right
        if not same.all():
            same = same | ((left != left) & (right != right))
        return bool(same.all())
    except (RuntimeError, TypeError):  # some kinds have no such comparison
        return repr(left) == repr(right)


def _shape(value: Any) -> tuple[Any, ...]:
    has_shape = is_array(value) or (is_tensor(value) and not value.is_nested)
    return (value.shape, value.dtype) if has_shape else ()


class _Reader(pickle.Pickler):
    """Pickles a value into a digest, without a copy of the bytes."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse a tensor: its pickle can differ for the same numbers."""
        if is_tensor(obj):
            raise pickle.PicklingError
        return NotImplemented


def _digest(value: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    _Reader(SimpleNamespace(write=digest.update), protocol=5).dump(value)
    return digest.digest()


def _have_equal_digests(values: Sequence[Any]) -> bool:
    """Return whether all pickles are equal. Values with different pickles may still be equal."""
    try:
        return len({_digest(one) for one in values}) == 1
    except Exception:  # a class of the program's may do anything in __reduce__
        return False


def _shown(values: Sequence[Any]) -> str:
    return "(" + ", ".join(map(_short, values[:4])) + (", ..." if len(values) > 4 else "") + ")"


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the program's may do anything in __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 40 else text[:39] + "…"
