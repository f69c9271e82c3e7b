"""``Table``: the columns and row groups of a set of Parquet files, checked before reading begins."""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lagom.errors import DataError
from lagom.extensions.data.column_types import unischema
from lagom.extensions.data.column_types.common_types import cast, is_read_as
from lagom.extensions.data.parquet import filtering
from lagom.extensions.data.sources.file_versions import FileVersions
from lagom.extensions.data.sources.files import DataFile, Location, arrow, locate
from lagom.extensions.data.sources.footers import (
    PAGE_BYTES,
    Footer,
    check_names,
    common_field,
    open_file,
    partitions_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from lagom.extensions.data.sources.mapped_columns import MappedColumns

    Columns = Sequence[str] | Callable[[list[str]], Sequence[str]]

_THREADS = 16
"""Number of threads that read footers; they mostly wait for the file system."""


@dataclass(frozen=True)
class RowGroup:
    """Place of a row group (file and index), and the number of its rows that pass the filter."""

    file: int
    """Number of the file in the table."""
    index: int
    """Index of the row group in the file."""
    num_rows: int
    """Number of rows that pass the filter."""


class OpenedTable(NamedTuple):
    """Holds a Parquet file that is open for reading, with the input file below it."""

    parquet: Any
    """pyarrow's ``ParquetFile``."""
    file: Any
    """pyarrow's input file, from which ``parquet`` reads."""


@dataclass(frozen=True)
class Table:
    """The files, columns and row groups to read. It is a plain value, which is sent to ranks and workers."""

    home: Any
    """pyarrow's file system."""
    files: tuple[DataFile, ...]
    fields: tuple[Any, ...]
    """Arrow's fields of the chosen columns."""
    also: tuple[Any, ...]
    """Arrow's fields of columns that only the filter needs."""
    partitions: tuple[str, ...]
    """Names of the partition columns, whose values are in the names of folders, or in the log of a Delta table."""
    filter: Any
    """An expression of pyarrow.compute, or None."""
    groups: tuple[RowGroup, ...]
    num_bytes: int
    """Estimated bytes of all decoded rows before the filter, from types and footers."""
    num_stored: int
    """Number of rows before the filter."""
    page_bytes: int
    """Estimated largest number of bytes of open pages while one row group is decoded."""
    chunk_bytes: int
    """Stored bytes of the largest column chunk."""
    schema: Mapping[str, unischema.UnischemaField] | None
    """Petastorm's schema, if petastorm wrote the files."""
    stamps: FileVersions = dataclasses.field(compare=False)
    mapped: MappedColumns | None = None
    """Finds columns whose names in the files are not those of the table; None if they are the same."""
    deleted: Mapping[int, NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    """Rows that are deleted (deletion vectors of Delta), in order, by number of the file."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of rows of each row group that pass the filter."""
        return tuple(group.num_rows for group in self.groups)

    @cached_property
    def row_bytes(self) -> int:
        """Estimated bytes of a decoded row."""
        return max(1, self.num_bytes // max(self.num_stored, 1))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of files (names, sizes), columns, filter and row counts; equal on ranks that see the same data set."""
        told = [(file.name, file.size, file.partition) for file in self.files]
        text = repr((told, [str(field) for field in self.fields], str(self.filter), self.groups))
        for file, rows in self.deleted.items():
            text += f" {file} {hashlib.blake2b(rows.tobytes()).hexdigest()}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def open(self, file: int, footer: Any = None) -> OpenedTable:
        """Open the Parquet file number ``file``; a known ``footer`` is not read again.

        Raises:
            DataError: if the file has changed or cannot be opened.
        """
        self.stamps.look(self.home, self.files[file].path)
        source, opened = open_file(self.home, self.files[file], footer, whole=self.chunk_bytes <= PAGE_BYTES)
        return OpenedTable(opened, source)

    def batches(
        self, opened: Any, group: int, most: int, *, threads: bool, without: Collection[int] = ()
    ) -> Iterator[Any]:
        """Yield the rows of a row group that pass the filter, as record batches of ``fields``.

        Args:
            opened: the ``ParquetFile`` of the row group's file.
            group: number of the row group.
            most: largest number of rows of a record batch.
            threads: whether Arrow decodes columns in threads of its own.
            without: numbers of fields that are not read.

        Raises:
            DataError: if the file has changed or cannot be read.
        """
        import pyarrow as pa

        row_group = self.groups[group]
        file = self.files[row_group.file]
        stored = self.stored_names(opened.schema_arrow)
        names = {
            stored[field.name]: field.name
            for number, field in enumerate(self._read)
            if field.name not in self.partitions and number not in without and field.name in stored
        }
        kept = self._kept(opened.metadata, row_group)
        try:
            for batch in opened.iter_batches(
                batch_size=most, row_groups=[row_group.index], columns=list(names), use_threads=threads
            ):
                # Checked for each batch, since the file may be overwritten while it is read.
                self.stamps.check(self.home, file.path)
                if kept is not None:
                    part, kept = kept[: len(batch)], kept[len(batch) :]
                    batch = batch.filter(pa.array(part)) if names else batch.slice(0, int(part.sum()))
                yield self._finished(self._renamed(batch, names), file, without)
        except (OSError, ValueError) as error:  # Arrow's errors derive from one of these
            raise DataError(
                f"{file.path}, row group {row_group.index}, cannot be read: it has changed, is damaged or is gone: "
                f"{error}"
            ) from error

    def stored_names(self, schema: Any) -> Mapping[str, str]:
        """Return the names in a file of the columns that it has; ``schema`` is Arrow's schema of the file."""
        return {name: name for name in schema.names} if self.mapped is None else self.mapped.stored(schema)

    def _renamed(self, batch: Any, names: Mapping[str, str]) -> Any:
        import pyarrow as pa

        if self.mapped is None or not names:
            return batch
        columns = {names[field.name]: column for field, column in zip(batch.schema, batch.columns, strict=True)}
        return pa.record_batch({name: self.mapped.renamed(name, column) for name, column in columns.items()})

    def _kept(self, metadata: Any, group: RowGroup) -> NDArray[np.bool_] | None:
        """Return which rows of a row group are not deleted; None if its file has no deleted rows."""
        if group.file not in self.deleted:
            return None
        first = sum(metadata.row_group(index).num_rows for index in range(group.index))
        kept = np.ones(metadata.row_group(group.index).num_rows, bool)
        start, stop = np.searchsorted(self.deleted[group.file], [first, first + len(kept)])
        kept[self.deleted[group.file][start:stop] - first] = False
        return kept

    @property
    def _read(self) -> tuple[Any, ...]:
        return self.fields + self.also

    def partition_fields(self) -> list[Any]:
        """Return the fields of the partition columns among those that are read."""
        return [field for field in self._read if field.name in self.partitions]

    def _finished(self, batch: Any, file: DataFile, without: Collection[int]) -> Any:
        import pyarrow as pa

        for field in self.partition_fields():
            batch = batch.append_column(field, pa.repeat(file.value(field), len(batch)))
        for number, field in enumerate(self._read):
            place = batch.schema.get_field_index(field.name)
            # A file of a Delta table lacks columns that were added to the table later.
            if place < 0 and number not in without:
                batch = batch.append_column(field, pa.nulls(len(batch), field.type))
            elif place >= 0 and not is_read_as(batch.schema.field(place).type, field.type):
                batch = batch.set_column(place, field, cast(batch.column(place), field.type))
        if self.filter is not None:
            kept = pa.Table.from_batches([batch]).filter(self.filter).combine_chunks().to_batches()
            batch = kept[0] if kept else batch.slice(0, 0)
        return batch.select([field.name for number, field in enumerate(self.fields) if number not in without])


def table(sources: Sequence[str], columns: Columns | None, filters: Any, filesystem: Any) -> Table:
    """Find the files, read all footers, check that they fit together, and return the table.

    Args:
        sources: paths or URLs of folders or files.
        columns: names, or a function that chooses from all names; None: all columns.
        filters: rows to keep, in pyarrow's notation; None: all rows.
        filesystem: pyarrow's or fsspec's file system; None to choose it by URL.

    Raises:
        DataError: if files are missing, cannot be read or do not fit together, or no row is left.
        LagomError: if pyarrow is not installed, or for a Delta table deltalake, for an Iceberg table pyiceberg.
        ValueError: for a column that does not exist, or a wrong filter.
    """
    arrow()
    where = locate(list(sources), filesystem)
    home, files = where.home, where.files
    schema = unischema.read_fields(home, where.folder) if where.folder is not None else None
    stamps = FileVersions()
    log = where.table
    footers = _footers(home, files, stamps, None if log is None else log.mapped)
    partitions = partitions_of(files)
    chosen = _choose_columns(columns, where, footers, partitions)
    field_of = _field_finder(where, footers, partitions, schema)
    expression, used = filtering.expression(filters)
    read = {*chosen, *used} - set(partitions)
    deleted = {} if log is None else _deleted(files, footers, log.deleted)
    groups = list(chain(*(_row_groups(number, footer, deleted.get(number)) for number, footer in enumerate(footers))))
    made = Table(
        home=home,
        files=tuple(files),
        fields=tuple(map(field_of, chosen)),
        also=tuple(field_of(name) for name in used if name not in chosen),
        partitions=tuple(partitions),
        filter=expression,
        groups=tuple(group for group in groups if group.num_rows),
        num_bytes=sum(footer.num_bytes(set(chosen) - set(partitions)) for footer in footers),
        num_stored=sum(footer.metadata.num_rows for footer in footers),
        page_bytes=max(footer.page_bytes(read) for footer in footers),
        chunk_bytes=max(footer.chunk_bytes(read) for footer in footers),
        schema=schema,
        stamps=stamps,
        mapped=None if log is None else log.mapped,
        deleted=deleted,
    )
    if expression is not None:
        made = replace(made, groups=tuple(filtering.counted(made, used)))
    if not made.groups:
        has_rows = any(group.num_rows for group in groups)
        raise DataError(f"no row of {sources[0]} passes the filters" if has_rows else f"{sources[0]} has no rows")
    return made


def _row_groups(number: int, footer: Footer, deleted: NDArray[np.int64] | None) -> list[RowGroup]:
    sizes = [footer.metadata.row_group(index).num_rows for index in range(footer.metadata.num_row_groups)]
    if deleted is not None:
        bounds = np.searchsorted(deleted, np.concatenate([[0], np.cumsum(sizes)]))
        sizes = [size - int(lost) for size, lost in zip(sizes, np.diff(bounds), strict=True)]
    return [RowGroup(number, index, size) for index, size in enumerate(sizes)]


def _deleted(
    files: list[DataFile], footers: list[Footer], told: Mapping[str, NDArray[np.int64]]
) -> dict[int, NDArray[np.int64]]:
    """Return the deleted rows by number of the file.

    Raises:
        DataError: if a deletion vector names a row that its file does not have.
    """
    deleted = {number: told[file.name] for number, file in enumerate(files) if file.name in told}
    for number, rows in deleted.items():
        if len(rows) and rows[-1] >= footers[number].metadata.num_rows:
            raise DataError(
                f"the deletion vector of {files[number].path} names row {rows[-1]}, and the file has "
                f"{footers[number].metadata.num_rows} rows: the log and the file do not belong together"
            )
    return {number: rows for number, rows in deleted.items() if len(rows)}


def _footers(home: Any, files: list[DataFile], stamps: FileVersions, mapped: MappedColumns | None) -> list[Footer]:
    def footer(file: DataFile) -> Footer:
        stamps.look(home, file.path)
        return Footer(home, file, mapped)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(footer, files))


def _field_finder(
    where: Location,
    footers: list[Footer],
    partitions: list[str],
    schema: Mapping[str, unischema.UnischemaField] | None,
) -> Callable[[str], Any]:
    """Return the function that finds Arrow's field of a column by its name."""
    log = where.table
    kinds = {**({} if log is None else log.kinds), **(schema or {})}
    declared = {} if log is None else log.types
    return lambda name: common_field(name, where.files, footers, partitions, kinds, declared)


def _choose_columns(
    columns: Columns | None, where: Location, footers: list[Footer], partitions: list[str]
) -> list[str]:
    """Return the names of the chosen columns, each once."""
    if columns is None:
        columns = _all_columns(where, footers, partitions)
    elif callable(columns):
        declared = {} if where.table is None else where.table.types
        stored = chain(*(footer.schema.names for footer in footers))
        columns = columns(list(dict.fromkeys([*declared, *stored, *partitions])))
    if not columns:
        raise ValueError("columns is empty; name at least one")
    return list(dict.fromkeys(columns))


def _all_columns(where: Location, footers: list[Footer], partitions: list[str]) -> list[str]:
    """Check that the files' columns fit together; return the names of all columns, partition columns last."""
    declared = None if where.table is None else list(where.table.types)
    check_names(where.files, footers, declared or ())
    return [name for name in declared or footers[0].schema.names if name not in partitions] + partitions
