"""``ColumnEntry``: converts an Arrow column to arrays without a loop over rows, and applies the choice for nulls."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lagom.errors import DataError
from lagom.extensions.data.column_types import common_types, lists, types
from lagom.extensions.data.column_types.values import Arrow, Dense, Nulls, Path, Values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.reused_arrays import ReusedArrays
    from lagom.extensions.data.parquet.table import Table

Policy = str | int | float
NULLS = ("error", "mask", "nan", "")
RAGGED = ("error", "pad", "list")
_ROW_BITS = 40


class Codec(Protocol):
    """Converts the cells of a column that petastorm encoded."""

    def convert(self, array: Any, path: Path, where: Where) -> Values:
        """Return the values of the Arrow array ``array``, a part of the column ``path``; ``where`` is its origin."""


@dataclass(frozen=True)
class Where:
    """Names the table, row group and first row that values were read from, for errors."""

    table: Table
    number: int
    """Number of the row group in the table."""
    first: int
    """Index of the first row in the row group, among the rows that pass the table's filter."""
    memory: ReusedArrays | None = None
    """Gives memory for converted values; None if these are copied later anyway."""

    def error(self, path: Path, row: int, why: str) -> DataError:
        """Return an error that names file, row group, column and row; ``row`` is counted from ``first``."""
        group = self.table.groups[self.number]
        file = self.table.files[group.file].path
        return DataError(f"{file}, row group {group.index}, column {'.'.join(path)!r}, row {self.first + row}: {why}")

    def origins(self, count: int) -> NDArray[np.int64]:
        """Return a number for each of ``count`` rows, which ``at`` turns back into an origin."""
        return (self.number << _ROW_BITS) + np.arange(self.first, self.first + count)

    def at(self, origin: int) -> Where:
        """Return the origin of the row with the number ``origin``."""
        return Where(self.table, origin >> _ROW_BITS, origin & ((1 << _ROW_BITS) - 1))


@dataclass(frozen=True)
class ColumnEntry:
    """A column, or a field of a struct column, that becomes one entry of a batch."""

    path: Path
    type: Any
    """Arrow's type."""
    nulls: Policy
    ragged: str
    codec: Codec | None = None
    cells: Callable[[Any], list[Any]] | None = None
    """Makes the cells of an Arrow array that the function of a transform gets: values then keep the types of the file.
    If None, values get types that torch computes with."""

    def convert(self, column: Any, where: Where) -> dict[Path, Values]:
        """Return the values of this entry, and its mask if ``nulls`` is "mask", by path.

        Args:
            column: Arrow array of the whole column; this entry may be one of its fields.

        Raises:
            DataError: for a row that cannot be a tensor.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        dtype = _as_stored(column.type)
        if dtype is not None and self.codec is None and self.nulls != "mask" and not column.null_count and len(column):
            # A fast path for most columns of most tables.
            return {self.path: Dense(lists.writable(lists.view(column, dtype)))}
        array = column if len(self.path) == 1 else pc.struct_field(column, list(self.path[1:]))
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()

        def error_at(row: int, why: str) -> Exception:
            return where.error(self.path, row, why)

        if array.null_count:
            self._check_nulls(array, error_at)
        found: dict[Path, Values] = {self.path: self._values(array, where, error_at)}
        if self.nulls == "mask":
            valid = np.ones(len(array), bool) if not array.null_count else _valid(array)
            found[(*self.path[:-1], self.path[-1] + "__valid")] = Dense(valid.copy())
        return found

    def _check_nulls(self, array: Any, error_at: Callable[[int, str], Exception]) -> None:
        row = int(np.argmin(_valid(array)))
        if self.nulls == "error":
            raise error_at(row, f"a null; {_NULL_CHOICES}")
        if self.nulls == "mask" or (self.nulls == "" and types.is_text(self.type) and self.codec is None):
            return
        is_cell = self.codec is not None and not types.is_number(self.type)
        if is_cell or types.is_text(self.type) or types.is_vector(self.type):
            also = ' or ""' if types.is_text(self.type) and not is_cell else ""
            raise error_at(row, f'a null, for which {self.nulls!r} cannot stand in {self.type}; nulls="mask"{also} can')
        if self.nulls == "" or (self.nulls == "nan" and not types.is_float(types.innermost(self.type))):
            what = "text" if self.nulls == "" else "NaN"
            raise error_at(row, f"a null, and {self.type} has no {what}; {_NULL_CHOICES}")

    def _values(self, array: Any, where: Where, error_at: Callable[[int, str], Exception]) -> Values:
        import pyarrow as pa

        try:
            if self.codec is not None:
                if array.null_count and types.is_number(self.type):  # petastorm's scalars
                    array = array.fill_null(pa.scalar(self._fill()).cast(array.type))
                return self.codec.convert(array, self.path, where)
            has_none = len(array) > 0 and array.null_count == len(array)
            if types.is_vector(self.type):
                vectors = lists.vectors(array)
                return Nulls(vectors, 0) if has_none else Dense(vectors)
            if types.is_text(self.type):
                return Arrow(_large(array.fill_null("") if self.nulls == "" else array), self.cells or lists.objects)
            if self.cells is not None and self._stays_in_arrow:
                return Arrow(self._kept(array), self.cells)
            if self.ragged != "error" and types.is_ragged(self.type):
                return self._ragged(array)
            fill = self._fill()
            strict = self.nulls in ("error", "mask")
            values = lists.writable(lists.dense(array, self.type, fill, strict=strict, is_own=self.cells is not None))
            return Nulls(values, fill) if has_none and not values.size else Dense(values)
        except lists.RowError as error:
            raise error_at(error.row, str(error)) from None
        except (ValueError, OverflowError, ArithmeticError) as error:  # Arrow's errors are ValueErrors
            raise error_at(0, f"or one after it cannot be made numbers: {error}") from error

    @property
    def _stays_in_arrow(self) -> bool:
        """Whether a function gets values that numpy has no numbers for, or lists, each with its own length."""
        is_number = types.is_plain_number(types.innermost(self.type))
        return not is_number or (types.is_ragged(self.type) and self.ragged == "list")

    def _kept(self, array: Any) -> Any:
        array = common_types.cast(array, common_types.logical(array.type))
        if self.nulls == "error":
            lists.check_inner_nulls(array)
        return array if isinstance(self.nulls, str) and self.nulls != "nan" else lists.filled(array, self._fill())

    def _ragged(self, array: Any) -> Values:
        import pyarrow as pa

        inner = self.type.value_type
        if not types.is_number(inner):
            raise lists.RowError(0, f'ragged="{self.ragged}" is for lists of numbers, and this is {self.type}')
        offsets = np.asarray(array.offsets)
        lengths = np.diff(offsets)
        if array.null_count:
            lengths = np.where(_valid(array), lengths, 0)
        strict = self.nulls in ("error", "mask")
        try:
            values = lists.dense(
                array.flatten(), inner, self._fill(), strict=strict, depth=1, is_own=self.cells is not None
            )
        except lists.RowError as error:
            row = int(np.searchsorted(np.cumsum(lengths), error.row, side="right"))
            raise lists.RowError(row, str(error)) from None
        starts = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
        flat = pa.LargeListArray.from_arrays(starts, pa.array(values))
        return Arrow(flat, lists.padded if self.ragged == "pad" else lists.tensors)

    def _fill(self) -> int | float:
        if isinstance(self.nulls, str):
            return float("nan") if self.nulls == "nan" else 0
        return self.nulls


def column_entries(
    field: Any,
    nulls: Policy,
    ragged: str,
    codec: Codec | None = None,
    cells: Callable[[Any], list[Any]] | None = None,
) -> list[ColumnEntry]:
    """Return the entries of a batch that an Arrow field becomes: one, or for a struct one for each inner field.

    Args:
        cells: as for ``ColumnEntry``. If given, any type is allowed.

    Raises:
        ValueError: if the field has a type that cannot become a tensor. In a Spark DataFrame ``unsupported_part`` in
            ``extensions/data/dataframes.py`` refuses such a type before the run.
    """
    import pyarrow as pa

    def walk(path: Path, kind: Any) -> list[ColumnEntry]:
        kind = types.plain(kind)
        if codec is not None or types.is_vector(kind):
            return [ColumnEntry(path, kind, nulls, ragged, codec, cells)]
        if pa.types.is_struct(kind):
            return [entry for inner in kind for entry in walk((*path, inner.name), inner.type)]
        if cells is None and not types.can_be_tensor(kind):
            raise ValueError(
                f"column {'.'.join(path)!r} has the type {kind}, which cannot be a tensor; "
                "leave it out with columns=[...], or have it written as numbers"
            )
        return [ColumnEntry(path, kind, nulls, ragged, cells=cells)]

    return walk((field.name,), field.type)


def policy(choice: Any | Mapping[str, Any], name: str) -> Any:
    """Return the policy for column ``name``: ``choice`` itself, or its entry if it is a dict, by default "error"."""
    return choice.get(name, "error") if isinstance(choice, dict) else choice


def check_policies(nulls: Any, ragged: Any, names: list[str]) -> None:
    """Check the settings ``nulls`` and ``ragged``, and that the names of masks are free.

    Raises:
        ValueError: for a wrong setting, or a mask whose name is a column's.
    """
    for option, choice in (("nulls", nulls), ("ragged", ragged)):
        for name in choice if isinstance(choice, dict) else ():
            if name not in names:
                raise ValueError(f"{option} names the column {name!r}, and there are {names}")
    for one in nulls.values() if isinstance(nulls, dict) else [nulls]:
        if isinstance(one, bool) or (one not in NULLS if isinstance(one, str) else not isinstance(one, (int, float))):
            raise ValueError(f"nulls is {one!r}; {_NULL_CHOICES}")
    for name in names:
        if policy(nulls, name) == "mask" and f"{name}__valid" in names:
            raise ValueError(
                f"nulls is 'mask' for the column {name!r}, and there is a column '{name}__valid' already; "
                "leave one of them out with columns=[...], or say nulls= by column"
            )
    for one in ragged.values() if isinstance(ragged, dict) else [ragged]:
        if one not in RAGGED:
            raise ValueError(f"ragged is {one!r}, not one of {RAGGED}")


_NULL_CHOICES = (
    'nulls= may be a number to put there, "nan" (floats), "" (texts), "mask" (adds a column NAME__valid), "error", or '
    "a dict of these by column"
)


@functools.lru_cache(maxsize=1024)
def _as_stored(kind: Any) -> np.dtype[Any] | None:
    """Return the numpy type of numbers that torch can use in Arrow's memory, unconverted; None for other types."""
    import pyarrow.types as t

    if not (t.is_integer(kind) or t.is_floating(kind)):
        return None
    found = types.numpy_type(kind)
    return found if found == kind.to_pandas_dtype() else None


def _valid(array: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def _large(array: Any) -> Any:
    """Return texts or bytes with 64-bit offsets, since many rows together may have more than 2 GB."""
    import pyarrow as pa

    return array.cast(pa.large_string() if types.is_string(array.type) else pa.large_binary())
