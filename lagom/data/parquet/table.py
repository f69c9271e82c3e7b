"""A table of Parquet files: its columns, its row groups and how many rows they have, checked before it is read."""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from lagom.data.columns import unischema
from lagom.data.sources.file_versions import FileVersions
from lagom.data.sources.files import DataFile, arrow, locate
from lagom.data.sources.footers import PAGE_BYTES, Footer, check_names, common_field, open_file, partitions_of
from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    Columns = Sequence[str] | Callable[[list[str]], Sequence[str]]

_THREADS = 16
"""That read footers, which is mostly waiting."""


@dataclass(frozen=True)
class RowGroup:
    """A row group."""

    file: int
    index: int
    num_rows: int
    """That pass the filter."""


class OpenedTable(NamedTuple):
    """A file that is being read."""

    parquet: Any
    """pyarrow's ``ParquetFile``."""
    file: Any
    """What it reads from."""


@dataclass(frozen=True)
class Table:
    """What is to be read; a value, which travels to ranks and workers."""

    home: Any
    """The file system, pyarrow's."""
    files: tuple[DataFile, ...]
    fields: tuple[Any, ...]
    """Of the columns asked for, Arrow's."""
    also: tuple[Any, ...]
    """Of columns that are read for the filter only."""
    partitions: tuple[str, ...]
    """Names of columns that stand in folders' names."""
    filter: Any
    """An expression of pyarrow.compute, or None."""
    groups: tuple[RowGroup, ...]
    num_bytes: int
    """Of all rows before the filter, decoded; an estimate by types and by what footers say."""
    num_stored: int
    """Rows before the filter."""
    page_bytes: int
    """Of the pages that are open where one row group is being decoded, at most."""
    chunk_bytes: int
    """The largest part of a column in a row group, as it is stored."""
    schema: Mapping[str, unischema.UnischemaField] | None
    """Petastorm's, where it wrote the files."""
    stamps: FileVersions = dataclasses.field(compare=False)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each row group."""
        return tuple(group.num_rows for group in self.groups)

    @cached_property
    def row_bytes(self) -> int:
        """Of a row in memory."""
        return max(1, self.num_bytes // max(self.num_stored, 1))

    @cached_property
    def fingerprint(self) -> str:
        """Of the rows and their order: equal where every rank sees the same data set."""
        told = [(file.name, file.size, file.partition) for file in self.files]
        text = repr((told, [str(field) for field in self.fields], str(self.filter), self.groups))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def open(self, file: int, footer: Any = None) -> OpenedTable:
        """Open the Parquet file number ``file``; a known ``footer`` is not read again."""
        self.stamps.look(self.home, self.files[file].path)
        source, opened = open_file(self.home, self.files[file], footer, whole=self.chunk_bytes <= PAGE_BYTES)
        return OpenedTable(opened, source)

    def batches(
        self, opened: Any, group: int, most: int, *, threads: bool, without: Collection[int] = ()
    ) -> Iterator[Any]:
        """The rows of row group number ``group``, a few at a time, as record batches of ``fields``.

        With ``threads`` Arrow decodes columns in threads of its own. Fields with the numbers ``without`` are not read.

        Raises:
            DataError: when they cannot be read.
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
                # Not only when it is opened: it may be written over while it is read.
                self.stamps.check(self.home, file.path)
                yield self._finished(batch, file, without)
        except (OSError, ValueError) as error:  # Arrow's are one or the other
            raise DataError(
                f"{file.path}, row group {found.index}, cannot be read: it has changed, is damaged or is gone: {error}"
            ) from error

    @property
    def _read(self) -> tuple[Any, ...]:
        return self.fields + self.also

    def partition_fields(self) -> list[Any]:
        """Those of the columns that stand in folders' names."""
        return [field for field in self._read if field.name in self.partitions]

    def _finished(self, batch: Any, file: DataFile, without: Collection[int]) -> Any:
        import pyarrow as pa

        for field in self.partition_fields():
            batch = batch.append_column(field, pa.repeat(_partition_value(file, field), len(batch)))
        for number, field in enumerate(self._read):
            if number not in without and field.name not in batch.schema.names:  # added later, to a Delta table
                batch = batch.append_column(field, pa.nulls(len(batch), field.type))
        if self.filter is not None:
            kept = pa.Table.from_batches([batch]).filter(self.filter).combine_chunks().to_batches()
            batch = kept[0] if kept else batch.slice(0, 0)
        return batch.select([field.name for number, field in enumerate(self.fields) if number not in without])


def _partition_value(file: DataFile, field: Any) -> Any:
    import pyarrow as pa

    text = dict(file.partition)[field.name]
    return pa.scalar(None, field.type) if text is None else pa.scalar(text).cast(field.type)


def table(sources: Sequence[str], columns: Columns | None, filters: Any, filesystem: Any) -> Table:
    """Read the footers of all files, and check that they fit together.

    ``columns`` are names, or a function that chooses among all there are.

    Raises:
        DataError: when they do not.
        ValueError: when a column is asked for that is not there.
    """
    arrow()
    where = locate(list(sources), filesystem)
    home, files = where.home, where.files
    schema = unischema.found(home, where.folder) if where.folder is not None else None
    stamps = FileVersions()

    def footer(file: DataFile) -> Footer:
        stamps.look(home, file.path)
        return Footer(home, file)

    with ThreadPoolExecutor(_THREADS) as pool:
        footers = list(pool.map(footer, files))
    partitions = partitions_of(files)
    added = where.names or ()
    if columns is None:
        check_names(files, footers, added)
        names = where.names or footers[0].schema.names
        there = {name for footer in footers for name in footer.schema.names}
        columns = [name for name in names if name in there and name not in partitions] + partitions
        if absent := [name for name in where.names or () if name not in columns]:
            raise DataError(
                f"column {absent[0]!r} of {sources[0]} is in none of its files; say columns=[...] without it"
            )
    if callable(columns):
        columns = columns(list(dict.fromkeys([*chain(*(footer.schema.names for footer in footers)), *partitions])))
    if not columns:
        raise ValueError("columns is empty; name at least one")

    def named(name: str) -> Any:
        return common_field(name, files, footers, partitions, {**where.kinds, **(schema or {})}, added)

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
        made = replace(made, groups=tuple(_counted(made)))
    if not made.groups:
        raise DataError(
            f"no row of {sources[0]} passes the filters" if made.num_stored else f"{sources[0]} has no rows"
        )
    return made


def _expression(filters: Any) -> tuple[Any, list[str]]:
    """``filters``, an expression or a list of them in pyarrow's spelling, and the columns it looks at."""
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


def _counted(made: Table) -> list[RowGroup]:
    """Row groups with the number of rows that pass the filter, for which its columns are read once."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    form = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    fields = pa.schema(made.partition_fields())

    def counted(number: int) -> list[RowGroup]:
        file = made.files[number]
        told = None
        for field in fields:
            value = _partition_value(file, field)
            here = ds.field(field.name) == value if value.is_valid else ds.field(field.name).is_null()
            told = here if told is None else told & here
        found = []
        for group in (group for group in made.groups if group.file == number):
            part = form.make_fragment(file.path, made.home, partition_expression=told, row_groups=[group.index])
            names = (*part.physical_schema.names, *fields.names)
            added = pa.schema([field for field in made.fields + made.also if field.name not in names])
            schema = pa.unify_schemas([part.physical_schema, fields, added])
            found.append(replace(group, num_rows=part.scanner(schema=schema, filter=made.filter).count_rows()))
        return found

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = list(pool.map(counted, range(len(made.files))))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise ValueError(f"filters cannot be applied: {error}") from error
    return [group for part in parts for group in part if group.num_rows]
