"""Footers of Parquet files: opened, measured, and checked for whether they fit together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from lagom.data.columns import types
from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from lagom.data.columns.unischema import UnischemaField
    from lagom.data.sources.files import DataFile

PAGE_BYTES = 1 << 20
"""Of a page, about, as writers make them."""
_BUFFER = 1 << 16
"""Bytes that are read ahead in a column chunk that is larger than a page."""


def open_file(home: Any, file: DataFile, footer: Any = None, *, whole: bool = False) -> tuple[Any, Any]:
    """The file ``file``, and what it is as Parquet; with ``footer``, its metadata, that is not read again.

    With ``whole``, a column's part of a row group is read at once. Otherwise it is read as it is decoded, in pages: it
    may be large, and only its beginning wanted.

    Raises:
        DataError: when it is not there, not as it was, or no such file.
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
            # Where the writer has noted them, as Spark does: a bit that has flipped is an error, and no other number.
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
    """What a file's footer says."""

    def __init__(self, home: Any, file: DataFile) -> None:
        with open_file(home, file)[1] as opened:
            self.metadata = opened.metadata
            self.schema = opened.schema_arrow
        self._names = set(self.schema.names)

    def num_bytes(self, names: set[str]) -> int:
        """Of the columns ``names``, decoded."""
        names = names & self._names
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
        """Of what is open of each of these columns, as it is stored and decoded; where a row group has most of it."""
        return max((sum(map(_page_bytes, group)) for group in self._chunks(names)), default=0)

    def chunk_bytes(self, names: set[str]) -> int:
        """What the largest of these columns has in a row group, as it is stored."""
        return max((chunk.total_compressed_size for group in self._chunks(names) for chunk in group), default=0)

    def _chunks(self, names: set[str]) -> Iterator[list[Any]]:
        """Of each row group, what these columns have in it."""
        for index in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(index)
            columns = [group.column(number) for number in range(group.num_columns)]
            yield [column for column in columns if self._column_of(column.path_in_schema) in names]

    def _column_of(self, path: str) -> str:
        """The column that the values at ``path`` are in: names may have dots themselves."""
        while path and path not in self._names:
            path = path.rpartition(".")[0]
        return path


def _page_bytes(chunk: Any) -> int:
    """Of a page of a column, as it is stored and decoded, and of its dictionary."""
    whole: int = chunk.total_uncompressed_size
    stored: int = max(chunk.total_compressed_size, 1)
    dictionary = 0
    if chunk.dictionary_page_offset is not None:
        # How large it is decoded the page itself says, and the footer of all pages together.
        part = min(max(chunk.data_page_offset - chunk.dictionary_page_offset, 0) / stored, 1.0)
        dictionary = int(whole * part)
    return dictionary + min(whole - dictionary, PAGE_BYTES) + min(stored, PAGE_BYTES)


def partitions_of(files: list[DataFile]) -> list[str]:
    """Names of the columns that folders stand for."""
    names = [name for name, _ in files[0].partition]
    for file in files:
        if [name for name, _ in file.partition] != names:
            raise DataError(
                f"{file.path} and {files[0].path} are in folders of other partitions; name a folder of one kind"
            )
    return names


def check_names(files: list[DataFile], footers: list[Footer], added: Collection[str]) -> None:
    """Make sure that all files have the same columns, but for those that may have been ``added`` later."""
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
    added: Collection[str],
) -> Any:
    """The field ``name``, which must be the same in all files; those that are older than an ``added`` one lack it."""
    import pyarrow as pa

    if name in partitions:
        dtype = told[name].dtype if name in told else None
        if dtype is not None:
            return pa.field(name, pa.string() if dtype.kind in "USO" else pa.from_numpy_dtype(dtype))
        values = [dict(file.partition)[name] for file in files]
        return pa.field(name, pa.int64() if all(_is_integer(value) for value in values) else pa.string())
    have = [number for number, footer in enumerate(footers) if name in footer.schema.names]
    first = have[0] if have and name in added else 0
    schema = footers[first].schema
    if name not in schema.names:
        raise ValueError(f"there is no column {name!r} in {files[0].path}, which has {[*schema.names, *partitions]}")
    wanted = schema.field(name)
    for file, footer in zip(files, footers, strict=True):
        if name not in footer.schema.names:
            if name in added:
                continue
            raise DataError(f"column {name!r} is in {files[0].path} but not in {file.path}")
        found = footer.schema.field(name)
        if _bare(found.type) != _bare(wanted.type):
            raise DataError(
                f"column {name!r} is {wanted.type} in {files[first].path} and {found.type} in {file.path}; "
                "have the data set written with one type"
            )
    return wanted


def _bare(kind: Any) -> str:
    """The type without the names that writers give to the items of lists."""
    kind = types.plain(kind)
    return f"{_bare(kind.value_type)}[]" if types.is_ragged(kind) else str(kind)


def _is_integer(value: str | None) -> bool:
    return value is None or (value.removeprefix("-").isdecimal() and value.isascii() and -(2**63) <= int(value) < 2**63)
