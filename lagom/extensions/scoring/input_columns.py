"""``InputColumns``: columns of a batch of rows as tensors, converted when they are read, with the choice for nulls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lagom.extensions.data.column_types.lists import RowError, dense, objects, tensors, vectors, writable
from lagom.extensions.data.column_types.types import can_be_tensor, is_number, is_ragged, is_text, is_vector, plain

NULL_CHOICES = (
    'nulls= may be "null" (such rows have null outputs) or a dict of values to put there, such as {"age": 0}; or leave '
    "such rows out"
)


class ScoringError(RuntimeError):
    """A batch of rows cannot be scored; the text says why, and names the row."""


class CellError(Exception):
    """Raised for a column that cannot be a tensor, at a row of the batch if that is known."""

    def __init__(self, row: int | None, why: str) -> None:
        super().__init__(why)
        self.row = row


class InputColumns(Mapping[str, Any]):
    """Columns of a record batch by name: tensors of numbers and of lists of one length, else lists of Python's values.

    Args:
        batch: Arrow's record batch.
        names: names of the columns that there are.
        fills: values to put in the place of nulls, by column.
        only_tensors: whether a column that is no tensor is an error.
    """

    def __init__(
        self, batch: Any, names: Sequence[str], fills: Mapping[str, Any], *, only_tensors: bool = False
    ) -> None:
        self._batch = batch
        self._only_tensors = only_tensors
        self._names = tuple(names)
        self._fills = fills
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the column ``name``.

        Raises:
            KeyError: if there is no such column; the text has the names of all.
            CellError: if the column has nulls that nothing was chosen for.
        """
        if name not in self._names:
            raise KeyError(f"{name!r}; the columns are {', '.join(map(repr, self._names))}")
        if name not in self._read:
            self._read[name] = self._values(name, self._batch.column(self._batch.schema.get_field_index(name)))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def stacked(self, names: Sequence[str], dtype: Any) -> Any:
        """Return columns side by side, as ``stacked`` does; plain numbers are copied once.

        Raises:
            CellError: as for a column.
        """
        import numpy as np
        import torch

        columns = [self._batch.column(self._batch.schema.get_field_index(name)) for name in names]
        if dtype not in (torch.float32, torch.float64) or not all(map(_has_plain_numbers, columns)):
            return stacked({name: self[name] for name in names}, dtype)
        out = np.empty((len(columns[0]), len(columns)), np.float32 if dtype == torch.float32 else np.float64)
        for number, column in enumerate(columns):
            out[:, number] = column.to_numpy()
        return torch.from_numpy(out)

    def _values(self, name: str, column: Any) -> Any:
        if (count := column.null_count) and name not in self._fills:
            first = column.is_valid().index(False).as_py()
            raise CellError(first, f"column {name!r} has {num_nulls(count, len(column))}; {NULL_CHOICES}")
        try:
            return tensor_of(column, self._fills.get(name))
        except RowError as error:
            kind = plain(column.type)
            has_lengths = is_ragged(kind) and is_number(plain(kind.value_type))
            if self._only_tensors or not has_lengths or str(error).startswith("a null"):
                raise CellError(error.row, f"column {name!r}: {_reason(error)}") from None
            return tensors(column)


def _reason(error: RowError) -> str:
    """Return the reason of ``error`` without what only a ``ParquetDataset`` can do."""
    why, _, _ = str(error).partition(";")
    return f"{why}; give nulls= or make lists of one length, or give transform=, which gets a list of tensors"


def _has_plain_numbers(column: Any) -> bool:
    """Return whether an Arrow column has integers or floats without nulls, which numpy reads where they are."""
    import pyarrow.types as t

    return not column.null_count and bool(t.is_integer(column.type) or t.is_floating(column.type))


def num_nulls(count: int, num_rows: int) -> str:
    """Return the number of nulls among rows as text."""
    return f"{count} null{'s' * (count != 1)} in {num_rows} row{'s' * (num_rows != 1)}"


def tensor_of(column: Any, fill: Any) -> Any:
    """Return an Arrow column as a tensor; texts, bytes and other values that are no numbers as a list.

    Args:
        fill: takes the place of nulls; None if there are none.

    Raises:
        RowError: for lists of different lengths, or with nulls inside.
    """
    import torch

    kind = plain(column.type)
    if column.type != kind:
        column = column.storage if hasattr(column, "storage") else column
        column = column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
    if is_vector(kind):
        return torch.from_numpy(vectors(column))
    if is_text(kind) or not can_be_tensor(kind):
        return [fill if value is None else value for value in objects(column)]
    values = dense(column, kind, 0 if fill is None else fill, strict=fill is None)
    return torch.from_numpy(writable(values))


def stacked(columns: Mapping[str, Any], dtype: Any) -> Any:
    """Return columns of numbers, and of lists of numbers, side by side as a tensor of shape ``(rows, numbers)``."""
    import torch

    if wrong := [name for name, column in columns.items() if column.dim() > 2]:
        raise ScoringError(f"column {wrong[0]!r} has lists of lists, which cannot stand beside other columns")
    widths = [1 if column.dim() == 1 else column.shape[1] for column in columns.values()]
    out = torch.empty((len(next(iter(columns.values()))), sum(widths)), dtype=dtype)
    start = 0
    for column, width in zip(columns.values(), widths, strict=True):
        out[:, start : start + width] = column if column.dim() == 2 else column[:, None]
        start += width
    return out
