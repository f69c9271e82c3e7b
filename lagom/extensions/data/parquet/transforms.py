"""``Transform``: applies the function of a ``TransformSpec`` to the rows of a batch; ``collate`` makes the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lagom.errors import DataError
from lagom.extensions.data.column_types import lists, returned
from lagom.extensions.data.column_types.encoded_cells import CellColumn, Encoded
from lagom.extensions.data.column_types.values import Arrow, Dense

if TYPE_CHECKING:
    from lagom.extensions.data.column_types.values import Block
    from lagom.extensions.data.parquet.rows import Rows


class Transform:
    """Applies a ``TransformSpec`` to the rows of a batch, and returns a dict for each row."""

    def __init__(self, spec: Any, *, is_petastorm: bool, nulls_are_none: bool) -> None:
        self._func = spec.func
        self._removed = list(spec.removed_fields or [])
        self._selected = None if spec.selected_fields is None else list(spec.selected_fields)
        self._is_petastorm = is_petastorm
        self._nulls_are_none = nulls_are_none
        self.resizes = not is_petastorm
        """Whether the number of rows may change: a function of a DataFrame may add or drop rows."""

    def __call__(self, rows: Rows) -> list[dict[str, Any]]:
        block = rows.block()
        if self._is_petastorm:
            found = [self._func(row) for row in numpy_rows(block, self._nulls_are_none)]
        else:
            found = self._of_frame(block)
        return [self._kept(row) for row in found]

    def _of_frame(self, block: Block) -> list[dict[str, Any]]:
        import pandas as pd  # type: ignore[import-untyped]

        given = frame_of(block, self._nulls_are_none)
        num_rows = len(given)
        frame = self._func(given)
        if not isinstance(frame, pd.DataFrame):
            raise DataError(
                f"transform_spec's function returned {_described(frame)}; of a data set that petastorm did not write "
                "it gets a pandas DataFrame of the rows of a batch, and returns one"
            )
        if not len(frame):
            raise DataError(
                f"transform_spec's function left none of the {num_rows} rows that it got, a batch or a rank's "
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
    """Return the cells of a DataFrame's column; numpy's types are kept, which iterating over pandas would lose."""
    if isinstance(column.dtype, np.dtype):
        return column.to_numpy() if column.dtype.kind in "biufmM" else column
    if getattr(column.dtype, "tz", None) is not None:
        return column.dt.tz_convert(None).to_numpy()
    return [value if there else None for value, there in zip(column, column.notna(), strict=True)]


def frame_of(block: Block, nulls_are_none: bool) -> Any:
    """Return the rows of ``block`` as a DataFrame, as petastorm passes them to a transform of plain Parquet.

    Args:
        nulls_are_none: whether to use the masks of columns to put pandas' nulls in the place of nulls.
    """
    import pandas as pd

    columns: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in block):
        values = block.get((name,))
        mask = block.get((f"{name}__valid",)) if nulls_are_none else None
        if values is None:  # a struct
            rows = numpy_rows({path: one for path, one in block.items() if path[0] == name}, nulls_are_none)
            columns[name] = pd.Series([row[name] for row in rows], dtype=object)
        elif not (nulls_are_none and (name.removesuffix("__valid"),) in block and name.endswith("__valid")):
            columns[name] = _series(values, None if mask is None else mask.array)
    return pd.DataFrame(columns)


def _series(values: Any, valid: Any) -> Any:
    """Return a column as a Series, with pandas' nulls where ``valid`` is False."""
    import pandas as pd

    if isinstance(values, Arrow) and values.finish is not lists.padded:
        return values.array.to_pandas()
    if isinstance(values, Dense) and values.array.ndim == 1:
        array = values.array
        if valid is None or valid.all():
            return pd.Series(array)
        is_bool = array.dtype.kind == "b"
        column = array.astype(object if is_bool else array.dtype if array.dtype.kind == "f" else np.float64)
        column[~valid] = None if is_bool else np.nan
        return pd.Series(column)
    column = np.empty(len(values), object)
    for row, value in enumerate(_values(values)):
        column[row] = value if valid is None or valid[row] else None
    return pd.Series(column)


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
                null = _null(block[path])
                columns[path] = [value if valid else null for value, valid in zip(columns[path], mask, strict=True)]
    rows: list[dict[str, Any]] = [{} for _ in next(iter(columns.values()))]
    for path, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            inner = row
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = value
    return rows


def _null(values: Any) -> Any:
    """Return what petastorm passes for a null: NaN among floats, else None."""
    is_float = isinstance(values, Dense) and values.array.ndim == 1 and values.array.dtype.kind == "f"
    return values.array.dtype.type("nan") if is_float else None


def _values(values: Any) -> list[Any]:
    if isinstance(values, Encoded):
        values = values.decoded()
    if isinstance(values, CellColumn):
        return list(values.cells)
    if isinstance(values, Dense):
        return list(values.array)
    if isinstance(values, Arrow) and values.finish is not lists.padded:
        return list(values.batch())
    return [value.numpy() if isinstance(value, torch.Tensor) else value for value in values.batch()]


def collate(rows: list[dict[str, Any]]) -> Any:
    """Make a batch from rows that are dicts: a dict of tensors, and lists of texts.

    Raises:
        DataError: if a field is None in a row, is an array of texts, shapes or types do not fit together, or a uint64
            exceeds int64.
    """
    try:
        return default_collate([_computable(row) for row in rows])
    except (RuntimeError, TypeError) as error:
        shapes = {name: {np.shape(row[name]) for row in rows} for name in rows[0]}
        told = {name: sorted(found) for name, found in shapes.items() if len(found) > 1}
        raise DataError(f"rows do not fit into a batch{f'; shapes differ: {told}' if told else ''}: {error}") from error


def _computable(row: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of a row in types that ``default_collate`` knows and torch computes with."""
    values = {}
    for key, value in row.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            values[key] = _computable(value, f"{name}.")
            continue
        try:
            values[key] = returned.computable(value)
        except returned.NullError:
            raise DataError(
                f"field {name!r} is None in a row that transform_spec's function returned; have the function "
                "replace it, or pass nulls= to the loader"
            ) from None
        except ValueError as error:
            raise DataError(f"field {name!r} of a row that transform_spec's function returned: {error}") from error
    return values
