"""``PetastormDataLoader``: loads batches of a data set that petastorm or Spark wrote, without petastorm."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lagom.data.column_types import petastorm_codecs
from lagom.data.column_types.encoded_cells import CellColumn, Encoded
from lagom.data.column_types.values import Dense
from lagom.data.parquet.dataset import ParquetDataset
from lagom.data.parquet.parquet_loader import ParquetLoader
from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lagom.data.column_types.values import Block
    from lagom.data.parquet.rows import Rows


class TransformSpec:
    """A transform of rows, with petastorm's interface.

    Args:
        func: function of a row, which is a dict of numpy values by field; or, for plain Parquet, of a pandas DataFrame
            with the rows of a batch. It returns the same type.
        edit_fields: fields that ``func`` changes; not needed here.
        removed_fields: fields to remove after ``func``.
        selected_fields: fields to keep after ``func``, in this order.

    Raises:
        ValueError: if ``removed_fields`` and ``selected_fields`` are both given.
    """

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Sequence[Any] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        if removed_fields is not None and selected_fields is not None:
            raise ValueError("removed_fields and selected_fields are both given; say one of them")
        self.func = func
        self.edit_fields = list(edit_fields or [])
        self.removed_fields = list(removed_fields or [])
        self.selected_fields = selected_fields


_INSTEAD = {
    "predicate": "use filters=[(column, operator, value)] here, or petastorm's own make_reader",
    "rowgroup_selector": "use filters=[(column, operator, value)] here, or petastorm's own make_reader",
    "num_epochs": "here each `for` over the loader is an epoch",
    "cur_shard": "lagom itself divides the rows over the ranks",
    "shard_count": "lagom itself divides the rows over the ranks",
    "workers_count": "num_workers=, of torch's DataLoader, is the number of processes that read",
    "reader_pool_type": "num_workers=, of torch's DataLoader, is the number of processes that read",
}
"""Options that are not taken, and what there is in their place."""


class PetastormDataLoader(ParquetLoader):
    """Loads batches of a Parquet data set: dicts of tensors by field, with lists for texts.

    Args:
        dataset: a path, a URL or a list of these, or a ``ParquetDataset`` (a DataFrame in the config becomes one). If
            petastorm wrote the data set, cells are decoded by its schema.
        batch_size: rows of a batch.
        transform_spec: a function or a ``TransformSpec``, also petastorm's own. The function gets None for nulls,
            unless ``nulls`` is set, here or in the data set.
        schema_fields: the fields to read: names, regular expressions that match names, or petastorm's fields.
        shuffle: whether each epoch has another order; True by default, as petastorm shuffles by default.
        shuffle_row_groups: petastorm's option; see ``shuffling_queue_capacity``.
        shuffling_queue_capacity: petastorm's option; it matters only whether it is 0. If it is 0 and
            ``shuffle_row_groups`` is False, rows come in the order of the files, also with ``shuffle=True``.
        seed: as for ``ParquetLoader``, like ``drop_last``.
        filters: as for ``ParquetDataset``, like ``nulls``, ``ragged``, ``window_bytes`` and ``streams``. With a
            function, ``ragged`` is "list" if it is not set.
        options: further options of torch's ``DataLoader``; ``collate_fn`` gets the rows of a batch, each a mapping.

    Raises:
        Exception: as ``ParquetLoader`` and ``ParquetDataset``.
    """

    def __init__(
        self,
        dataset: str | Path | Sequence[str | Path] | ParquetDataset,
        batch_size: int = 1,
        transform_spec: Any = None,
        *,
        schema_fields: Sequence[Any] | None = None,
        shuffle: bool = True,
        shuffle_row_groups: bool = True,
        shuffling_queue_capacity: int = 0,
        seed: int | None = None,
        drop_last: bool = False,
        filters: Any = None,
        nulls: Any = None,
        ragged: Any = None,
        window_bytes: int | None = None,
        streams: int | None = None,
        **options: Any,
    ) -> None:
        spec = transform_spec if hasattr(transform_spec, "func") else TransformSpec(transform_spec)
        if not callable(spec.func) and spec.func is not None:
            raise ValueError(f"transform_spec is {transform_spec!r}; it is a function or a TransformSpec")
        if "columns" in options:
            raise ValueError(f"columns is ParquetDataset's; here it is schema_fields={options['columns']!r}")
        for name in sorted(options.keys() & _INSTEAD.keys()):
            raise ValueError(f"{name} is an option of petastorm's readers; {_INSTEAD[name]}")
        transforms = spec.func is not None
        if isinstance(dataset, ParquetDataset):
            nulls = dataset.nulls if nulls is None and dataset.nulls != "error" else nulls
            ragged = dataset.ragged if ragged is None and dataset.ragged != "error" else ragged
        data = ParquetDataset(
            dataset,
            columns=None if schema_fields is None else functools.partial(_matching, _patterns(schema_fields)),
            filters=filters,
            nulls=nulls if nulls is not None else "mask" if transforms else "error",
            ragged=ragged if ragged is not None else "list" if transforms else "error",
            window_bytes=window_bytes,
            streams=streams,
        )
        if transforms or spec.removed_fields or spec.selected_fields is not None:
            data.transform = _Transform(spec, is_petastorm=data.table.schema is not None, nulls_are_none=nulls is None)
            options.setdefault("collate_fn", collate)
        mixed = shuffle and (shuffle_row_groups or shuffling_queue_capacity > 0)
        super().__init__(data, batch_size, mixed, seed=seed, drop_last=drop_last, **options)


def _patterns(fields: Any) -> list[str | re.Pattern[str]]:
    """Return the names, or patterns of names, of ``schema_fields``."""
    is_many = isinstance(fields, Iterable) and not isinstance(fields, (str, bytes)) and not hasattr(fields, "name")
    found: list[Any] = [getattr(field, "name", field) for field in fields] if is_many else [None]
    if not all(isinstance(one, (str, re.Pattern)) for one in found):
        raise ValueError(
            f"schema_fields is {fields!r}; it is a list of names, regular expressions or fields. Sequences of rows "
            "(NGram) are read by petastorm's own readers: see docs/data.md"
        )
    return found


def _matching(patterns: Sequence[str | re.Pattern[str]], names: list[str]) -> list[str]:
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(f"schema_fields names {pattern!r}, and there are {names}")
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)]


class _Transform:
    """Applies a ``TransformSpec`` to the rows of a batch, and returns a dict for each row."""

    def __init__(self, spec: Any, *, is_petastorm: bool, nulls_are_none: bool) -> None:
        self._func = spec.func
        self._removed = list(spec.removed_fields or [])
        self._selected = None if spec.selected_fields is None else list(spec.selected_fields)
        self._is_petastorm = is_petastorm
        self._nulls_are_none = nulls_are_none and spec.func is not None
        self.resizes = spec.func is not None and not is_petastorm
        """Whether the number of rows may change: a function of a DataFrame may add or drop rows."""

    def __call__(self, rows: Rows) -> list[dict[str, Any]]:
        found = numpy_rows(rows.block(), self._nulls_are_none)
        if self._func is not None:
            found = [self._func(row) for row in found] if self._is_petastorm else self._of_frame(found)
        return [self._kept(row) for row in found]

    def _of_frame(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        import pandas as pd  # type: ignore[import-untyped]

        frame = self._func(pd.DataFrame({name: _column([row[name] for row in rows]) for name in rows[0]}))
        if not isinstance(frame, pd.DataFrame):
            raise DataError(
                f"transform_spec's function returned {_described(frame)}; of a data set that petastorm did not write "
                "it gets a pandas DataFrame of the rows of a batch, and returns one"
            )
        if not len(frame):
            raise DataError(
                f"transform_spec's function left none of the {len(rows)} rows that it got, a batch or a rank's "
                "share of one; use filters=[...], or a larger batch_size"
            )
        columns = [_cells(frame.iloc[:, number]) for number in range(frame.shape[1])]
        return [dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def _kept(self, row: Any) -> dict[str, Any]:
        if not isinstance(row, Mapping):
            raise DataError(
                f"transform_spec's function returned {_described(row)}; it gets a row as a dict, and returns one"
            )
        names = self._selected if self._selected is not None else [name for name in row if name not in self._removed]
        for name in names:
            if name not in row:
                raise DataError(f"selected_fields names {name!r}, and a row has {list(row)} after the transform")
        return {name: row[name] for name in names}


def _described(value: Any) -> str:
    return "None (is there a return?)" if value is None else f"a {type(value).__name__}"


def _cells(column: Any) -> Any:
    """Return the cells of a DataFrame's column; numbers keep numpy's types, which iterating over pandas would lose."""
    return column.to_numpy() if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf" else column


def _column(values: list[Any]) -> Any:
    if any(value is None or isinstance(value, np.ndarray) for value in values):
        column = np.empty(len(values), object)
        for row, value in enumerate(values):
            column[row] = value
        return column
    return values


def numpy_rows(block: Block, nulls_are_none: bool) -> list[dict[str, Any]]:
    """Return the rows of ``block`` as petastorm passes them to a transform: numpy scalars and arrays, and texts.

    Args:
        nulls_are_none: whether to use the masks of columns to put None in the place of nulls.
    """
    columns = {path: _values(values) for path, values in block.items()}
    if nulls_are_none:
        for path in list(columns):
            mask = columns.pop((*path[:-1], path[-1] + "__valid"), None)
            if mask is not None:
                columns[path] = [value if valid else None for value, valid in zip(columns[path], mask, strict=True)]
    found: list[dict[str, Any]] = [{} for _ in next(iter(columns.values()))]
    for path, values in columns.items():
        for row, value in zip(found, values, strict=True):
            inner = row
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = value
    return found


def _values(values: Any) -> list[Any]:
    if isinstance(values, Encoded):
        values = values.decoded()
    if isinstance(values, CellColumn):
        return list(values.cells)
    if isinstance(values, Dense):
        return list(values.array)
    return [value.numpy() if isinstance(value, torch.Tensor) else value for value in values.batch()]


def collate(rows: list[dict[str, Any]]) -> Any:
    """Make a batch from rows that are dicts: a dict of tensors, and lists of texts.

    Raises:
        DataError: if a field is None in a row, shapes or types do not fit together, or a uint64 exceeds int64.
    """
    for row in rows:
        for name, value in row.items():
            if value is None:
                raise DataError(
                    f"field {name!r} is None in a row that transform_spec's function returned; have the function "
                    "replace it, or pass nulls= to the loader"
                )
    try:
        return default_collate([{name: _computable(name, value) for name, value in row.items()} for row in rows])
    except (RuntimeError, TypeError) as error:
        shapes = {name: {np.shape(row[name]) for row in rows} for name in rows[0]}
        told = {name: sorted(found) for name, found in shapes.items() if len(found) > 1}
        raise DataError(f"rows do not fit into a batch{f'; shapes differ: {told}' if told else ''}: {error}") from error


def _computable(name: str, value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    if value.dtype.kind in "US":
        return value.item()
    if value.dtype.kind != "u":
        return value
    try:
        return petastorm_codecs.widened(value, value.dtype)  # type: ignore[arg-type]  # a scalar is like an array of no dimension
    except ValueError as error:
        raise DataError(f"field {name!r} of a row that transform_spec's function returned: {error}") from error
