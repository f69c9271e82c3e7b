"""``Table``: the columns and row groups of a set of Parquet files, checked before reading begins."""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from lagom.data.column_types import unischema
from lagom.data.column_types.common_types import cast, is_read_as
from lagom.data.sources.file_versions import FileVersions
from lagom.data.sources.files import DataFile, Location, arrow, locate
from lagom.data.sources.footers import PAGE_BYTES, Footer, check_names, common_field, open_file, partitions_of
from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    Columns = Sequence[str] | Callable[[list[str]], Sequence[str]]

_THREADS = 16
"""Number of threads that read footers; they mostly wait for the file system."""
_MOST_COUNTED = 1 << 16
"""Largest number of rows that are read at a time to count those that pass the filter."""


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
        found = self.groups[group]
        file = self.files[found.file]
        names = [
            field.name
            for number, field in enumerate(self._read)
            if field.name not in self.partitions and number not in without and field.name in opened.schema_arrow.names
        ]
        try:
            for batch in opened.iter_batches(
                batch_size=most, row_groups=[found.index], columns=names, use_threads=threads
            ):
                # Checked for each batch, since the file may be overwritten while it is read.
                self.stamps.check(self.home, file.path)
                yield self._finished(batch, file, without)
        except (OSError, ValueError) as error:  # Arrow's errors derive from one of these
            raise DataError(
                f"{file.path}, row group {found.index}, cannot be read: it has changed, is damaged or is gone: {error}"
            ) from error

    @property
    def _read(self) -> tuple[Any, ...]:
        return self.fields + self.also

    def partition_fields(self) -> list[Any]:
        """Return the fields of the partition columns among those that are read."""
        return [field for field in self._read if field.name in self.partitions]

    def _finished(self, batch: Any, file: DataFile, without: Collection[int]) -> Any:
        import pyarrow as pa

        for field in self.partition_fields():
            batch = batch.append_column(field, pa.repeat(_partition_value(file, field), len(batch)))
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


def _partition_value(file: DataFile, field: Any) -> Any:
    import pyarrow as pa

    text = dict(file.partition)[field.name]
    return pa.scalar(None, field.type) if text is None else pa.scalar(text).cast(field.type)


def table(sources: Sequence[str], columns: Columns | None, filters: Any, filesystem: Any) -> Table:
    """Find the files, read all footers, check that they fit together, and return the table.

    Args:
        sources: paths or URLs of folders or files.
        columns: names, or a function that chooses from all names; None: all columns.
        filters: rows to keep, in pyarrow's notation; None: all rows.
        filesystem: pyarrow's or fsspec's file system; None to choose it by URL.

    Raises:
        DataError: if files are missing, cannot be read or do not fit together, or no row is left.
        LagomError: if pyarrow is not installed, or for a Delta table deltalake.
        ValueError: for a column that does not exist, or a wrong filter.
    """
    arrow()
    where = locate(list(sources), filesystem)
    home, files = where.home, where.files
    schema = unischema.read_fields(home, where.folder) if where.folder is not None else None
    stamps = FileVersions()
    footers = _footers(home, files, stamps)
    partitions = partitions_of(files)
    if columns is None:
        columns = _all_columns(where, footers, partitions, sources[0])
    elif callable(columns):
        columns = columns(list(dict.fromkeys([*chain(*(footer.schema.names for footer in footers)), *partitions])))
    if not columns:
        raise ValueError("columns is empty; name at least one")
    told = {**where.kinds, **(schema or {})}

    def named(name: str) -> Any:
        return common_field(name, files, footers, partitions, told, where.names or ())

    expression, used = _expression(filters)
    chosen = list(dict.fromkeys(columns))
    stored = {*chosen, *used} - set(partitions)
    groups = [
        RowGroup(number, index, footer.metadata.row_group(index).num_rows)
        for number, footer in enumerate(footers)
        for index in range(footer.metadata.num_row_groups)
    ]
    made = Table(
        home=home,
        files=tuple(files),
        fields=tuple(map(named, chosen)),
        also=tuple(named(name) for name in used if name not in chosen),
        partitions=tuple(partitions),
        filter=expression,
        groups=tuple(group for group in groups if group.num_rows),
        num_bytes=sum(footer.num_bytes(set(chosen) - set(partitions)) for footer in footers),
        num_stored=sum(group.num_rows for group in groups),
        page_bytes=max(footer.page_bytes(stored) for footer in footers),
        chunk_bytes=max(footer.chunk_bytes(stored) for footer in footers),
        schema=schema,
        stamps=stamps,
    )
    if expression is not None:
        made = replace(made, groups=tuple(_counted(made, used)))
    if not made.groups:
        raise DataError(
            f"no row of {sources[0]} passes the filters" if made.num_stored else f"{sources[0]} has no rows"
        )
    return made


def _footers(home: Any, files: list[DataFile], stamps: FileVersions) -> list[Footer]:
    def footer(file: DataFile) -> Footer:
        stamps.look(home, file.path)
        return Footer(home, file)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(footer, files))


def _all_columns(where: Location, footers: list[Footer], partitions: list[str], source: str) -> list[str]:
    """Check that the files' columns fit together; return the names of all columns, partition columns last."""
    check_names(where.files, footers, where.names or ())
    names = where.names or footers[0].schema.names
    there = {name for footer in footers for name in footer.schema.names}
    columns = [name for name in names if name in there and name not in partitions] + partitions
    if absent := [name for name in where.names or () if name not in columns]:
        raise DataError(f"column {absent[0]!r} of {source} is in none of its files; say columns=[...] without it")
    return columns


def _expression(filters: Any) -> tuple[Any, list[str]]:
    """Return ``filters`` (lists in pyarrow's notation) as an expression, and the columns that they use."""
    if filters is None:
        return None, []
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if isinstance(filters, pc.Expression):
        raise ValueError("filters is an expression; say it as [(column, operator, value), ...], or lists of such lists")
    try:
        expression = pq.filters_to_expression(filters)
        terms = filters if isinstance(filters[0], (list,)) else [filters]
        names = [str(term[0]) for conjunction in terms for term in conjunction]
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"filters is {filters!r}; say it as [(column, operator, value), ...]: {error}") from error
    return expression, list(dict.fromkeys(names))


def _counted(made: Table, used: list[str]) -> list[RowGroup]:
    """Return the row groups with rows that pass the filter, and the counts of such rows; reads the columns ``used``."""
    import pyarrow as pa

    fields = tuple(field for field in made.fields + made.also if field.name in used)
    asked = replace(made, fields=fields, also=())
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = list(pool.map(lambda number: _counted_in(asked, number), range(len(made.files))))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise ValueError(f"filters cannot be applied: {error}") from error
    return [group for part in parts for group in part if group.num_rows]


def _counted_in(asked: Table, number: int) -> list[RowGroup]:
    """Count the rows that pass the filter in file ``number``: by Arrow, which knows statistics, or by reading."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    file = asked.files[number]
    form = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    fields = pa.schema(asked.partition_fields())
    told = None
    for field in fields:
        value = _partition_value(file, field)
        here = ds.field(field.name) == value if value.is_valid else ds.field(field.name).is_null()
        told = here if told is None else told & here
    found = []
    for place, group in enumerate(asked.groups):
        if group.file != number:
            continue
        part = form.make_fragment(file.path, asked.home, partition_expression=told, row_groups=[group.index])
        stored = part.physical_schema
        if not all(
            is_read_as(stored.field(field.name).type, field.type)
            for field in asked.fields
            if field.name in stored.names
        ):
            read = asked.batches(asked.open(number).parquet, place, _MOST_COUNTED, threads=False)
            found.append(replace(group, num_rows=sum(map(len, read))))
            continue
        names = (*stored.names, *fields.names)
        added = pa.schema([field for field in asked.fields if field.name not in names])
        schema = pa.unify_schemas([stored, fields, added])
        count = part.scanner(schema=schema, filter=asked.filter).count_rows()
        # If the partition alone answers the filter, Arrow counts the rows of the whole file.
        found.append(replace(group, num_rows=min(count, group.num_rows)))
    return found
