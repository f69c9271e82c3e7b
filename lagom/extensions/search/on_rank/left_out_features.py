"""Leave features out of data sets: all samples have one value in the place of a feature. See Note [Left-out features].

``leave_out_features`` is the entry; ``_without`` lists the kinds of data sets.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lagom.extensions.data.parquet.dataset import ParquetDataset
from lagom.extensions.search.on_rank.changed_samples import ChangedIterable, ChangedSamples, SampleChange
from lagom.extensions.search.on_rank.feature_columns import (
    Feature,
    check_feature,
    constant,
    is_array,
    with_columns,
    without_columns,
)
from lagom.extensions.search.on_rank.neutral_value import NeutralValue, is_number, neutral_value
from lagom.program.signature import makes_data
from lagom.random_states import random_states, set_random_states

_READ = 1 << 16
"""Rows of a Parquet column that are read at a time."""

# Note [Left-out features]
#
# A program computes the width of its model, or writes it down, before it sees a batch, and reads columns by name. A
# missing column would be an error in most programs, or give a model other initial weights. So a column keeps its
# place and its type, and has the same value in all samples of both sets: it then says nothing about a sample.
#
# The value of numbers is 0: a network then trains like a network without the column, since 0 adds nothing to a linear
# layer, and its weights for the column get no gradient. The column's mean would not do this if the program does not
# normalise: an input of 50 in every sample is a large bias. Measured for a small network on a column of mean 50 and
# deviation 10: loss 4.56 without the column, 4.57 with 0, 4.93 with its mean. There is no 0 for a text, and programs
# look texts up in tables: a text is replaced by the most frequent text of the train set, or of the test set if there is
# no train set. In samples that a Dataset of the program makes one by one, the text is empty: to find the most frequent
# text, the whole set would have to be read. `drop=True` removes the column instead.


def leave_out_features(
    train_set: Any, test_set: Any, features: Sequence[Feature], names: Sequence[str], value: Any, drop: bool
) -> tuple[Any, Any]:
    """Return both sets without ``features``; a set may be None; for a function that makes a set, return a function.

    Args:
        names: names of the columns of samples that are tensors.
        value: value of all samples in place of a feature; None: 0, or the most frequent text of the train set.
        drop: remove the features instead.

    Raises:
        ValueError: for a feature that the train set does not have; from the returned function, if that makes the set.
    """
    make_train = functools.cache(lambda: train_set() if makes_data(train_set) else train_set)

    @functools.cache
    def constants() -> dict[Feature, Any]:
        source = test_set if train_set is None else make_train()
        return {name: _value(source, name, names, value, drop) for name in features}

    def change(data: Any) -> Any:
        return _without(data, constants(), names, drop)

    def changed(data: Any, make: Callable[[], Any]) -> Any:
        return (lambda: change(make())) if makes_data(data) else change(data) if data is not None else None

    return changed(train_set, make_train), changed(test_set, test_set)


def _value(data: Any, feature: Feature, names: Sequence[str], value: Any, drop: bool) -> Any:
    columns = columns_of(data, names)
    if columns is not None:
        check_feature(feature, columns, type(data).__name__)
    return value if value is not None or drop else _neutral(data, feature, names)


def check_features(data: Any, features: Sequence[Feature], names: Sequence[str], value: Any, drop: bool) -> None:
    """Check on the driver that ``data`` has ``features``, by its columns or its first sample.

    Raises:
        ValueError: for a feature that it does not have, or that cannot be replaced.
    """
    columns = columns_of(data, names)
    if columns is not None:
        for name in features:
            check_feature(name, columns, type(data).__name__)
        return
    before = random_states()
    with contextlib.suppress(KeyError, IndexError, TypeError, NotImplementedError, OSError):
        sample = data[0]
        SampleChange({_number(name, names): value for name in features}, drop)(sample)
    set_random_states(before)


def columns_of(data: Any, names: Sequence[str] = ()) -> list[Feature] | None:
    """Return the names or numbers of the columns of ``data``; None if ``data`` has no columns, only samples."""
    if isinstance(data, (DataLoader, Subset)):
        return columns_of(data.dataset, names)
    if isinstance(data, (ParquetDataset, Mapping)) or _is_frame(data):
        return list(data.columns if not isinstance(data, Mapping) else data)
    first = _first(data)
    return [*names, *range(first.shape[1])] if is_array(first) and first.ndim > 1 else None


def _neutral(data: Any, feature: Feature, names: Sequence[str]) -> Any:
    """Return the neutral value of a feature; None if ``data`` has no columns, only samples."""
    if isinstance(data, (DataLoader, Subset)):
        return _neutral(data.dataset, feature, names)
    if isinstance(data, ParquetDataset):
        return _neutral_in_table(data, str(feature))
    if _is_frame(data):
        column = data[feature]
        return 0 if column.dtype.kind in "biufc" or not column.count() else column.mode().iloc[0]
    if isinstance(data, Mapping):
        return neutral_value(data[feature])
    first = _first(data)
    return neutral_value(first[:, _number(feature, names)]) if is_array(first) and first.ndim > 1 else None


def _neutral_in_table(data: ParquetDataset, name: str) -> Any:
    column = ParquetDataset(data, columns=[name], nulls=_own(data.nulls, [name]), ragged=_own(data.ragged, [name]))
    found = NeutralValue()
    if len(column) and not is_number(column[0][name]):
        for start in range(0, len(column), _READ):
            found.add(column.__getitems__(range(start, min(start + _READ, len(column)))).batch()[name])
    column.close()
    return found.value()


def _without(data: Any, constants: Mapping[Feature, Any], names: Sequence[str], drop: bool) -> Any:
    if isinstance(data, (DataLoader, Subset)):
        copied = copy.copy(data)
        vars(copied)["dataset"] = _without(data.dataset, constants, names, drop)
        return copied
    if isinstance(data, ParquetDataset):
        return _table_without(data, constants, drop)
    if _is_frame(data):
        return data.drop(columns=list(constants)) if drop else _frame_with(data, constants)
    if isinstance(data, Mapping):
        return _mapping_without(data, constants, drop)
    if columns_of(data, names) is not None:
        return _tensors_without(data, {_number(name, names): value for name, value in constants.items()}, drop)
    change = SampleChange({_number(name, names): value for name, value in constants.items()}, drop)
    if isinstance(data, IterableDataset):
        return ChangedIterable(data, change)
    if isinstance(data, (list, tuple)):
        return type(data)(map(change, data))
    if isinstance(data, Dataset) or hasattr(data, "__getitem__"):
        return ChangedSamples(data, change)
    raise ValueError(f"a feature cannot be left out of a {type(data).__name__}; want a data set")


def _tensors_without(data: Any, constants: dict[Any, Any], drop: bool) -> Any:
    first = _first(data)
    first = without_columns(first, list(constants), 1) if drop else with_columns(first, constants, 1)
    if isinstance(data, tuple):
        return (first, *data[1:])
    if not isinstance(data, TensorDataset):
        return first
    found = copy.copy(data)
    found.tensors = (first, *data.tensors[1:])
    return found


def _mapping_without(data: Mapping[Any, Any], constants: Mapping[Feature, Any], drop: bool) -> dict[Any, Any]:
    if drop:
        return {name: column for name, column in data.items() if name not in constants}
    return {name: constant(old, constants[name]) if name in constants else old for name, old in data.items()}


def _table_without(data: ParquetDataset, constants: Mapping[Feature, Any], drop: bool) -> ParquetDataset:
    columns = [name for name in data.columns if name not in constants] if drop else data.columns
    dataset = ParquetDataset(
        data,
        columns=columns,
        nulls=_own(data.nulls, columns),
        ragged=_own(data.ragged, columns),
        window_bytes=data.window_bytes,
        streams=data.streams,
    )
    dataset.transform = data.transform
    if not drop:
        dataset.constants |= {str(name): value for name, value in constants.items()}
    return dataset


def _own(policy: Any, columns: Sequence[str]) -> Any:
    """Return the policy for nulls or ragged lists of these columns alone."""
    return {name: one for name, one in policy.items() if name in columns} if isinstance(policy, dict) else policy


def _frame_with(frame: Any, constants: Mapping[Feature, Any]) -> Any:
    found = frame.copy()
    for name, value in constants.items():
        column = frame[name]
        found[name] = type(column)([value] * len(column), index=frame.index, name=name).astype(column.dtype)
    return found


def _first(data: Any) -> Any:
    """Return the tensor with the columns: the first of a TensorDataset or of a tuple of arrays, or ``data`` itself."""
    if isinstance(data, TensorDataset):
        return data.tensors[0]
    return data[0] if isinstance(data, tuple) and data and all(map(is_array, data)) else data


def _number(feature: Feature, names: Sequence[str]) -> Feature:
    return names.index(feature) if isinstance(feature, str) and feature in names else feature


def _is_frame(value: Any) -> bool:
    return (pandas := sys.modules.get("pandas")) is not None and isinstance(value, pandas.DataFrame)
