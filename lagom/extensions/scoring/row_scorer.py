"""``RowScorer``: applies a model to record batches of Arrow, and names the row that fails.

See Note [Scoring by value].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lagom.extensions.scoring.input_columns import (
    NULL_CHOICES,
    CellError,
    InputColumns,
    ScoringError,
    num_nulls,
    stacked,
)
from lagom.extensions.scoring.output_columns import arrow_array, batch_of_pandas, named_outputs

_BATCH_BYTES = 8 << 20
_MOST_ROWS = 4096
_MOST_SHOWN = 8
_SAMPLE_ROWS = 8
_SHOWN = 40

Columns = str | tuple[str, ...]
"""A column, or several whose numbers are put side by side."""


@dataclass(frozen=True)
class Arguments:
    """Columns that become the arguments of a model, by position and by name."""

    positional: tuple[Columns, ...] = ()
    named: tuple[tuple[str, Columns], ...] = ()


@dataclass(eq=False)
class RowScorer:
    """A model, and how columns become its inputs and its outputs become columns."""

    model: Any
    """torch's module, in evaluation mode."""
    columns: tuple[str, ...]
    """Names of the columns that the model or ``transform`` may read."""
    key: tuple[str, ...] = ()
    """Names of the columns that name a row in errors."""
    arguments: Arguments | None = None
    """None if ``transform`` makes the arguments."""
    transform: Callable[[Any], Any] | None = None
    postprocess: Callable[[Any], Any] | None = None
    names: tuple[str, ...] | None = None
    """Names of the outputs; None for those of the model."""
    fills: Mapping[str, Any] = field(default_factory=dict)
    """Values in the place of nulls, by column."""
    skips_nulls: bool = False
    """Whether rows with nulls have null outputs."""
    batch_size: int | None = None
    device: str | None = None
    find_accelerator: Callable[[], Any] = lambda: None
    """Returns torch's device of this process's accelerator, which is used without a ``device``; None without any."""
    schema: Any = None
    """Arrow's schema of the outputs; None before ``describe``."""
    _place: Any = field(default=None, repr=False)
    _dtype: Any = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        if self._place is not None and self._place.type != "cpu":
            self.model.to("cpu")  # the reader may have no such device
            self._place = None
        return {**self.__dict__, "_place": None, "_dtype": None}

    def first_rows(self, rows: Any) -> Any:
        """Return the first rows of an Arrow table or batch that are scored, as a batch; None if there are none."""
        import pyarrow as pa

        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        for batch in batches:
            valid = self.scored_rows(batch)
            some = (batch if valid is None else batch.filter(pa.array(valid))).slice(0, _SAMPLE_ROWS)
            if len(some):
                return some
        return None

    def describe(self, batch: Any, where: str = "") -> Any:
        """Score the rows of ``batch``, set ``schema`` to the types of the outputs, and return it.

        Raises:
            ScoringError: if the rows cannot be scored.
        """
        import pyarrow as pa

        found = self._outputs(batch, range(len(batch)), where)
        self.schema = pa.schema([pa.field(name, array.type) for name, array in found.items()])
        return self.schema

    def score(self, batch: Any, first: int = 0, where: str = "") -> list[Any]:
        """Return the outputs for a record batch, as Arrow arrays in the order of ``schema``.

        Args:
            first: number of the batch's first row, for errors.
            where: place of the rows, for errors, such as "partition 3".

        Raises:
            ScoringError: if a row cannot be scored; the text names it.
        """
        import numpy as np
        import pyarrow as pa

        valid = self.scored_rows(batch)
        rows: Sequence[int] = range(first, first + len(batch))
        if valid is not None:
            rows = (first + np.flatnonzero(valid)).tolist()
            batch = batch.filter(pa.array(valid))
        parts = [self._typed(part, numbers, where) for part, numbers in self._parts(batch, rows)]
        columns = [_joined([part[n] for part in parts], each.type) for n, each in enumerate(self.schema)]
        if valid is None:
            return columns
        places = pa.array(np.cumsum(valid) - 1, mask=~valid)
        return [column.take(places) if len(column) else pa.nulls(len(valid), column.type) for column in columns]

    def read_pandas(self, frame: Any) -> Any:
        """Return the columns of a DataFrame of pandas that are read, as a record batch; see ``batch_of_pandas``."""
        return batch_of_pandas(frame, list(dict.fromkeys([*self.columns, *self.key])))

    def score_pandas(self, batch: Any, index: Any) -> Any:
        """Return the outputs for a record batch as a DataFrame of pandas with the index ``index``.

        Raises:
            ScoringError: as ``score``, and for nulls, with their number in all rows.
        """
        import pandas as pd  # type: ignore[import-untyped]

        self.check_nulls(batch)
        arrays = zip(self.schema.names, self.score(batch), strict=True)
        return pd.DataFrame({name: array.to_pandas().to_numpy() for name, array in arrays}, index=index)

    def check_nulls(self, rows: Any) -> None:
        """Check that an Arrow table or batch has no nulls that nothing was chosen for.

        Raises:
            ScoringError: for the first column with nulls; the text has their number.
        """
        if self.arguments is None or self.skips_nulls:
            return
        for name in self.columns:
            column = rows.column(rows.schema.get_field_index(name))
            if column.null_count and name not in self.fills:
                first = column.is_valid().index(False).as_py()  # type: ignore[attr-defined, unused-ignore]
                told = num_nulls(column.null_count, len(column))
                raise ScoringError(f"column {name!r} has {told}, the first one in row {first}; {NULL_CHOICES}")

    def scored_rows(self, batch: Any) -> Any:
        """Return which rows are scored, as a numpy array; None if all are."""
        import numpy as np

        if not self.skips_nulls:
            return None
        columns = [batch.column(batch.schema.get_field_index(name)) for name in self.columns if name not in self.fills]
        if not any(column.null_count for column in columns):
            return None
        return np.logical_and.reduce([column.is_valid().to_numpy(zero_copy_only=False) for column in columns])

    def _parts(self, batch: Any, rows: Sequence[int]) -> Iterator[tuple[Any, Sequence[int]]]:
        size = self.batch_size or max(1, min(_MOST_ROWS, _BATCH_BYTES // max(1, batch.nbytes // max(1, len(batch)))))
        for start in range(0, len(batch), size):
            yield batch.slice(start, size), rows[start : start + size]

    def _typed(self, batch: Any, rows: Sequence[int], where: str) -> list[Any]:
        found = self._outputs(batch, rows, where)
        if list(found) != self.schema.names:
            raise ScoringError(f"the model returned the outputs {list(found)}, and before {self.schema.names}")
        return [
            array if array.type == each.type else _cast(array, each)
            for array, each in zip(found.values(), self.schema, strict=True)
        ]

    def _outputs(self, batch: Any, rows: Sequence[int], where: str) -> dict[str, Any]:
        """Return the outputs for ``batch``, whose rows have the numbers ``rows``, as Arrow arrays by name."""
        try:
            output = self._computed(batch)
        except CellError as error:
            row_text = "" if error.row is None else f"{self._named(batch, error.row, rows, where)}: "
            raise ScoringError(f"{row_text}{error}") from None
        except ScoringError:
            raise
        except Exception as error:
            raise ScoringError(self._explained(error, batch, rows, where)) from error
        return {name: arrow_array(value) for name, value in named_outputs(output, self.names, len(batch)).items()}

    def _computed(self, batch: Any) -> Any:
        columns = InputColumns(batch, self.columns, self.fills, only_tensors=self.arguments is not None)
        return self.call(*self.arguments_of(columns))

    def call(self, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what the model gives for arguments by position and by name, after ``postprocess``."""
        import torch

        if self._place is None:
            self.load()
        with torch.inference_mode():
            output = self.model(*map(self._placed, given), **{name: self._placed(one) for name, one in named.items()})
            return output if self.postprocess is None else self.postprocess(output)

    def load(self) -> None:
        """Move the model to its device."""
        import torch

        self._place = torch.device(self.device) if self.device else self.find_accelerator() or torch.device("cpu")
        self.model.to(self._place)
        kinds = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        self._dtype = kinds.pop() if len(kinds) == 1 else None

    def arguments_of(self, columns: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the model's arguments by position and by name, of the columns of a batch."""
        if self.arguments is None:
            made = self.transform(columns)  # type: ignore[misc]
            if isinstance(made, Mapping):
                return (), {str(name): value for name, value in made.items()}
            return made if isinstance(made, tuple) else (made,), {}
        return (
            [self._argument(columns, names) for names in self.arguments.positional],
            {name: self._argument(columns, names) for name, names in self.arguments.named},
        )

    def _argument(self, columns: Mapping[str, Any], names: Columns) -> Any:
        import torch

        if isinstance(names, str):
            return columns[names]
        if self._place is None:
            self.load()
        dtype = self._dtype or torch.get_default_dtype()
        if isinstance(columns, InputColumns):
            return columns.stacked(names, dtype)
        return stacked({name: columns[name] for name in names}, dtype)

    def _placed(self, value: Any) -> Any:
        """Return an argument with its tensors on the device, and its floats in the type of the model's parameters."""
        import torch

        if isinstance(value, torch.Tensor):
            return value.to(self._place, self._dtype if self._dtype and value.is_floating_point() else None)
        if isinstance(value, dict):
            return {name: self._placed(item) for name, item in value.items()}
        return type(value)(map(self._placed, value)) if type(value) in (list, tuple) else value

    def _explained(self, error: Exception, batch: Any, rows: Sequence[int], where: str) -> str:
        """Return a text about an ``error`` of the program's code, with the first row that fails alone."""
        import torch

        why = f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            return f"out of memory for a batch of {len(batch)} rows; give a smaller batch_size=: {why}"
        row = self._failing_row(batch)
        if row is None:
            first, last = self._named(batch, 0, rows, where), self._named(batch, len(batch) - 1, rows, where)
            return f"the model fails for the batch from {first} to {last}, and for none of its rows alone: {why}"
        return f"the model fails for {self._named(batch, row, rows, where)}: {why}{self._shapes(batch)}"

    def _failing_row(self, batch: Any) -> int | None:
        """Return the first row that fails alone, found by halves; None if no half fails."""
        start, stop = 0, len(batch)
        while stop - start > 1:
            middle = (start + stop) // 2
            if self._fails(batch.slice(start, middle - start)):
                stop = middle
            elif self._fails(batch.slice(middle, stop - middle)):
                start = middle
            else:
                return None
        return start

    def _fails(self, batch: Any) -> bool:
        try:
            self._computed(batch)
        except Exception:  # the program's code; only the place is wanted
            return True
        return False

    def _shapes(self, batch: Any) -> str:
        try:
            columns = InputColumns(batch, self.columns, self.fills)
            given, named = self.arguments_of(columns)
        except Exception:  # then the transform has failed, and not the model
            return ""
        shown = [_short(value) for value in given] + [f"{name}={_short(value)}" for name, value in named.items()]
        return f" (it got {', '.join(shown)})"

    def _named(self, batch: Any, row: int, rows: Sequence[int], where: str) -> str:
        """Return a text that names a row, by its number and its values."""
        values = []
        for name in self.key or self.columns:
            text = repr(batch.column(batch.schema.get_field_index(name))[row].as_py())
            values.append(f"{name}={text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}")
        more = ["…"] * (len(values) > _MOST_SHOWN)
        place = f" of {where}" if where else ""
        return f"row {rows[row]}{place} ({', '.join([*values[:_MOST_SHOWN], *more])})"


def _joined(arrays: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    if len(arrays) == 1:
        return arrays[0]
    return pa.concat_arrays(arrays) if arrays else pa.array([], kind)


def _cast(array: Any, each: Any) -> Any:
    try:
        return array.cast(each.type)
    except ValueError as error:  # Arrow's errors are ValueErrors
        raise ScoringError(f"the output {each.name!r} is {array.type}, and was to be {each.type}: {error}") from error


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{str(value.dtype).removeprefix('torch.')} {tuple(shape)}"


# Note [Scoring by value]
#
# Executors, and processes that load a model of MLflow, may have no lagom, or another version. So this module,
# input_columns.py, output_columns.py, the two modules of column_types that they use, and what the scorer
# is given of accelerators.py are pickled by value, and import nothing else of lagom.
