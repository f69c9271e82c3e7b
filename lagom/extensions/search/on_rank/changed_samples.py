"""Data sets whose samples lack features: the samples of another data set, changed one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lagom.extensions.search.on_rank.feature_columns import (
    Feature,
    check_feature,
    constant,
    is_array,
    with_columns,
    without_columns,
)


class SampleChange:
    """Replaces or drops features of a sample: a dict, a tensor or array, or a tuple or list whose first part is one."""

    def __init__(self, constants: Mapping[Feature, Any], drop: bool) -> None:
        """Replace each feature by its value in ``constants`` (None: zero of its type); with ``drop``, remove it."""
        self._constants = dict(constants)
        self._drop = drop

    def __call__(self, sample: Any) -> Any:
        """Return a changed copy of ``sample``.

        Raises:
            ValueError: if ``sample`` lacks one of the features, is of another type, or has a value without a zero.
        """
        if isinstance(sample, Mapping):
            return self._entries(sample)
        if is_array(sample) and sample.ndim:
            return self._columns(sample)
        if isinstance(sample, (tuple, list)) and sample:
            parts = [self(sample[0]), *sample[1:]]
            # The class of a named tuple takes its fields as separate arguments.
            return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
        raise ValueError(
            f"a feature cannot be left out of a sample that is a {type(sample).__name__}; want a dict, a tensor, or a "
            "tuple whose first part is one of these"
        )

    def _entries(self, sample: Mapping[Any, Any]) -> Any:
        for name in self._constants:
            check_feature(name, list(sample), "sample")
        found: Any = copy.copy(sample) if hasattr(sample, "__setitem__") else dict(sample)
        for name, value in self._constants.items():
            if self._drop:
                del found[name]
            else:
                found[name] = constant(sample[name], value)
        return found

    def _columns(self, sample: Any) -> Any:
        own: dict[int, Any] = {}
        for name, value in self._constants.items():
            check_feature(name, range(sample.shape[0]), "sample")
            own[int(name)] = 0 if value is None else value
        return without_columns(sample, list(own), 0) if self._drop else with_columns(sample, own, 0)


class ChangedSamples(Dataset[Any]):
    """The samples of ``data``, each changed by ``change``."""

    def __init__(self, data: Any, change: SampleChange) -> None:
        self._data = data
        self._change = change

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        return self._change(self._data[index])

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples at ``indices``."""
        several = getattr(self._data, "__getitems__", None)
        samples = [self._data[index] for index in indices] if several is None else several(indices)
        return list(map(self._change, samples))

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)


class ChangedIterable(IterableDataset[Any]):
    """The samples of the iterable ``data``, each changed by ``change``."""

    def __init__(self, data: Any, change: SampleChange) -> None:
        self._data = data
        self._change = change

    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._data)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, name)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of the data set itself, such as ``classes``.

    Raises:
        AttributeError: for a private name; and for a tensor or array, which may hold the features.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    attribute = getattr(owner._data, name)
    if is_array(attribute):
        raise AttributeError(
            f"{type(owner._data).__name__}.{name} has the features that are left out of this trial; take its samples, "
            "data[index], or give a function that makes the data set without them"
        )
    return attribute
