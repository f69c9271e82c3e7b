"""``Footer``: opens Parquet files, measures their columns, and checks that the files of a table fit together."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Any

from lagom.errors import DataError
from lagom.extensions.data.column_types import types
from lagom.extensions.data.column_types.common_types import common_type, fits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import numpy as np

    from lagom.extensions.data.column_types.unischema import UnischemaField
    from lagom.extensions.data.sources.files import DataFile
    from lagom.extensions.data.sources.mapped_columns import MappedColumns

PAGE_BYTES = 1 << 20
"""Approximate size of a page, by the defaults of programs that write Parquet."""
_BUFFER = 1 << 16
"""Bytes that Arrow reads at a time from a column chunk, in tables with a column chunk larger than a page."""


def open_file(home: Any, file: DataFile, footer: Any = None, *, whole: bool = False) -> tuple[Any, Any]:
    """Open ``file``; return pyarrow's input file and its ``ParquetFile``.

    Args:
        footer: the file's metadata, if known, so that it is not read again.
        whole: whether to read a column chunk at once. Otherwise it is read piece by piece (``_BUFFER``), since it may
            be large, and only its beginning may be needed.

    Raises:
        DataError: if the file is gone or cannot be opened, has another size than before, or is not a Parquet file.
    """
    import pyarrow.parquet as pq

    try:
        source = home.open_input_file(file.path)
        if source.size() != file.size:
            raise DataError(
                f"{file.path} has {source.size()} bytes, and had {file.size} when the data set was made: it was "
                "written again since; make the ParquetDataset anew"
            )
        buffer = 0 if whole else _BUFFER
        return source, pq.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=False,
            buffer_size=buffer,
            coerce_int96_timestamp_unit="us",
            # For files with checksums, as Spark writes them: a flipped bit raises an error instead of a wrong number.
            page_checksum_verification=True,
        )
    except FileNotFoundError as error:
        raise DataError(f"{file.path} is gone; it was there when the data set was made") from error
    except OSError as error:  # Arrow's errors of a damaged file are ValueErrors
        raise DataError(f"{file.path} cannot be opened: {error}") from error
    except ValueError as error:
        what = (
            "an ORC file, and none of Parquet" if _begins(home, file, b"ORC") else "no Parquet file, or a damaged one"
        )
        raise DataError(f"{file.path} is {what}: {error}") from error


def _begins(home: Any, file: DataFile, magic: bytes) -> bool:
    try:
        with home.open_input_file(file.path) as source:
            return bool(source.read(len(magic)) == magic)
    except (OSError, ValueError):
        return False


class Footer:
    """The metadata and schema in a file's footer."""

    def __init__(self, home: Any, file: DataFile, mapped: MappedColumns | None = None) -> None:
        """Read the footer of ``file``; ``mapped`` finds its columns, if their names are not those of the table."""
        with open_file(home, file)[1] as opened:
            self.metadata = opened.metadata
            self.schema = opened.schema_arrow
        stored = dict(zip(self.schema.names, self.schema.names, strict=True))
        if mapped is not None:
            stored, self.schema = mapped.stored(self.schema), mapped.schema(self.schema)
        self._names: dict[str, str] = {one: name for name, one in stored.items()}
        """Names of the columns by their names in the file."""

    def num_bytes(self, names: set[str]) -> int:
        """Estimate the bytes of the columns ``names`` after decoding: by type, or else by their uncompressed size."""
        names = names & set(self.schema.names)
        stored = dict.fromkeys(names, 0)
        for index in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(index)
            for number in range(group.num_columns):
                column = group.column(number)
                name = self._column_of(column.path_in_schema)
                if name in stored:
                    stored[name] += column.total_uncompressed_size
        rows = self.metadata.num_rows
        widths = {name: types.width(self.schema.field(name).type) for name in names}
        return sum(rows * width if width else stored[name] for name, width in widths.items())

    def page_bytes(self, names: set[str]) -> int:
        """Estimate the most bytes of open pages, stored and decoded, while the columns ``names`` are read."""
        return max((sum(map(_page_bytes, group)) for group in self._chunks(names)), default=0)

    def chunk_bytes(self, names: set[str]) -> int:
        """Return the stored bytes of the largest column chunk of the columns ``names``."""
        return max((chunk.total_compressed_size for group in self._chunks(names) for chunk in group), default=0)

    def _chunks(self, names: set[str]) -> Iterator[list[Any]]:
        """Yield for each row group the chunks of the columns ``names``."""
        for index in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(index)
            columns = [group.column(number) for number in range(group.num_columns)]
            yield [column for column in columns if self._column_of(column.path_in_schema) in names]

    def _column_of(self, path: str) -> str:
        """Return the column that contains the values at ``path``; the names of columns may contain dots, too."""
        while path and path not in self._names:
            path = path.rpartition(".")[0]
        return self._names.get(path, "")


def _page_bytes(chunk: Any) -> int:
    """Estimate the bytes of a chunk's open page, stored and decoded, plus its decoded dictionary."""
    whole: int = chunk.total_uncompressed_size
    stored: int = max(chunk.total_compressed_size, 1)
    dictionary = 0
    if chunk.dictionary_page_offset is not None:
        # The footer has only the decoded size of all pages together, so estimate by the stored sizes.
        part = min(max(chunk.data_page_offset - chunk.dictionary_page_offset, 0) / stored, 1.0)
        dictionary = int(whole * part)
    return dictionary + min(whole - dictionary, PAGE_BYTES) + min(stored, PAGE_BYTES)


def partitions_of(files: list[DataFile]) -> list[str]:
    """Return the names of the partition columns.

    Raises:
        DataError: if files have different partition columns.
    """
    names = [name for name, _ in files[0].partition]
    for file in files:
        if [name for name, _ in file.partition] != names:
            raise DataError(
                f"{file.path} and {files[0].path} are in folders of other partitions; name a folder of one kind"
            )
    return names


def check_names(files: list[DataFile], footers: list[Footer], added: Collection[str]) -> None:
    """Check that all files have the same columns, except those in ``added``, which may be newer than some files.

    Raises:
        DataError: if a column is missing in a file, or occurs twice.
    """
    wanted = set(footers[0].schema.names)
    for file, footer in zip(files, footers, strict=True):
        name, times = Counter(footer.schema.names).most_common(1)[0] if footer.schema.names else ("", 1)
        if times > 1:
            raise DataError(
                f"{file.path} has {times} columns that are all called {name!r}; say columns=[...] without it"
            )
        if different := (wanted ^ set(footer.schema.names)).difference(added):
            name = min(different)
            has, lacks = (files[0], file) if name in wanted else (file, files[0])
            raise DataError(f"column {name!r} is in {has.path} but not in {lacks.path}; say columns=[...] without it")


def common_field(
    name: str,
    files: list[DataFile],
    footers: list[Footer],
    partitions: list[str],
    told: Mapping[str, UnischemaField],
    declared: Mapping[str, Any],
) -> Any:
    """Return Arrow's field for column ``name``.

    Args:
        partitions: names of the partition columns.
        told: types of partition columns, if known.
        declared: types of the columns in the log of a Delta table; older files may lack a column. Else empty. Where
            the type of a file does not fit, the common type of the files is taken, which holds their values exactly.

    Raises:
        DataError: if no type holds the values of all files without loss, or a file lacks a column that is not declared.
        ValueError: if the first file has no such column, and it is not declared.
    """
    import pyarrow as pa

    if name in partitions:
        return _partition_field(name, files, told[name].dtype if name in told else None)
    schema = footers[0].schema
    have = [number for number, footer in enumerate(footers) if name in footer.schema.names]
    if name not in declared:
        if name not in schema.names:
            names = list(declared) or [*schema.names, *partitions]
            raise ValueError(f"there is no column {name!r} in {files[0].path}, which has {names}")
        for file, footer in zip(files, footers, strict=True):
            if name not in footer.schema.names:
                raise DataError(f"column {name!r} is in {files[0].path} but not in {file.path}")
    paths: dict[Any, str] = {}
    for number in have:
        paths.setdefault(footers[number].schema.field(name).type, files[number].path)
    if name in declared and all(fits(kind, declared[name]) for kind in paths):
        return pa.field(name, declared[name])
    common = common_type(paths)
    if common is None:
        one, other = next(pair for pair in combinations(paths, 2) if common_type(pair) is None)
        raise DataError(
            f"column {name!r} is {one} in {paths[one]} and {other} in {paths[other]}; have the data set written with "
            "one type"
        )
    return footers[have[0]].schema.field(name).with_type(common)


def _partition_field(name: str, files: list[DataFile], dtype: np.dtype[Any] | None) -> Any:
    import pyarrow as pa

    if dtype is not None:
        return pa.field(name, pa.string() if dtype.kind in "USO" else pa.from_numpy_dtype(dtype))
    values = [dict(file.partition)[name] for file in files]
    return pa.field(name, pa.int64() if all(_is_integer(value) for value in values) else pa.string())


def _is_integer(value: str | None) -> bool:
    return value is None or (value.removeprefix("-").isdecimal() and value.isascii() and -(2**63) <= int(value) < 2**63)
