"""Pyarrow's data sets and file systems as they were before version 15, as far as petastorm uses them."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def local_type() -> Any:
    """The class of local file systems: fsspec's has the methods that pyarrow's had."""
    from fsspec.implementations.local import LocalFileSystem

    return LocalFileSystem


def _delegated(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self._hdfs, name)(*args, **options)

    method.__name__ = name
    return method


class HadoopFileSystem:
    """What petastorm's client of several name nodes has its methods from; it hands them on to a connection."""

    _hdfs: Any

    for _name in ("open", "exists", "isdir", "isfile", "info", "ls", "find", "walk", "mkdir", "rm", "delete"):
        locals()[_name] = _delegated(_name)


def connect(
    host: str = "default",
    port: int = 0,
    user: str | None = None,
    kerb_ticket: str | None = None,
    driver: str = "libhdfs",
    extra_conf: dict[str, str] | None = None,
) -> Any:
    """A connection to HDFS; ``driver`` says nothing any more, as pyarrow has only one."""
    del driver
    from fsspec.implementations import arrow

    return arrow.HadoopFileSystem(host=host, port=port, user=user, kerb_ticket=kerb_ticket, extra_conf=extra_conf)


class PartitionSet:
    """The values that one level of folders stands for."""

    def __init__(self, name: str, keys: list[str] | None = None) -> None:
        self.name = name
        self.keys = keys or []

    def get_index(self, key: str) -> int:
        """The number of ``key``, a new one where it has none."""
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)

    @property
    def dictionary(self) -> Any:
        """The values as an Arrow array: integers where all are."""
        try:
            return pa.array([int(key) for key in self.keys])
        except ValueError:
            return pa.array(self.keys, pa.string())


class ParquetPartitions:
    """The levels of folders that stand for columns."""

    def __init__(self) -> None:
        self.levels: list[PartitionSet] = []
        self.partition_names: set[str] = set()

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, level: int) -> PartitionSet:
        return self.levels[level]

    def get_index(self, level: int, name: str, key: str) -> int:
        """The number of a value at a level."""
        if level == len(self.levels):
            self.levels.append(PartitionSet(name))
            self.partition_names.add(name)
        if self.levels[level].name != name:
            raise ValueError(f"folders of partitions {self.levels[level].name!r} and {name!r} lie side by side")
        return self.levels[level].get_index(key)


class ParquetDatasetPiece:
    """A file, or a row group of one."""

    def __init__(
        self,
        path: str,
        open_file_func: Callable[[str], Any] | None = None,
        file_options: dict[str, Any] | None = None,
        row_group: int | None = None,
        partition_keys: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        self.path = str(path)
        self.open_file_func = open_file_func
        self.file_options = file_options or {}
        self.row_group = row_group
        self.partition_keys = list(partition_keys or [])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParquetDatasetPiece):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.path, self.row_group))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, row_group={self.row_group}, partition_keys={self.partition_keys})"

    def _key(self) -> tuple[Any, ...]:
        return self.path, self.row_group, self.partition_keys

    def _source(self) -> Any:
        return open(self.path, "rb") if self.open_file_func is None else self.open_file_func(self.path)

    def get_metadata(self) -> Any:
        """The file's footer."""
        with self._source() as source:
            return pq.ParquetFile(source, **self.file_options).metadata

    def read(
        self,
        columns: Iterable[str] | None = None,
        use_threads: bool = True,
        partitions: ParquetPartitions | None = None,
        **options: Any,
    ) -> Any:
        """Its rows as a table, with a dictionary column for each partition."""
        names = None if columns is None else list(columns)
        with self._source() as source:
            file = pq.ParquetFile(source, **self.file_options)
            if self.row_group is None:
                table = file.read(columns=names, use_threads=use_threads, **options)
            else:
                table = file.read_row_group(self.row_group, columns=names, use_threads=use_threads, **options)
        if self.partition_keys and partitions is None:
            raise ValueError("a piece of a data set with partitions is read with partitions=")
        for level, (name, index) in enumerate(self.partition_keys):
            assert partitions is not None
            indices = pa.array([index] * len(table), pa.int32())
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, partitions[level].dictionary))
        return table


class ParquetDataset:
    """The files of a folder, or of a list: what they are, not what is in them."""

    def __init__(
        self,
        path_or_paths: Any,
        filesystem: Any = None,
        validate_schema: bool = True,
        filters: Any = None,
        metadata_nthreads: int = 1,
    ) -> None:
        del validate_schema, metadata_nthreads
        self.fs = _with_fsspec(filesystem)
        is_one = isinstance(path_or_paths, str) or (len(path_or_paths) == 1 and self.fs.isdir(path_or_paths[0]))
        self.paths = path_or_paths
        self.partitions: ParquetPartitions | None = None
        self.common_metadata_path: str | None = None
        self.metadata_path: str | None = None
        one = path_or_paths if isinstance(path_or_paths, str) else path_or_paths[0]
        if is_one and self.fs.isdir(one):
            self.pieces = self._walked(one.rstrip("/"))
        else:
            files = [path_or_paths] if isinstance(path_or_paths, str) else list(path_or_paths)
            for file in files:
                if not self.fs.isfile(file):
                    raise OSError(f"{file} is no file" if len(files) > 1 else f"{file} does not exist")
            self.pieces = [ParquetDatasetPiece(file, self.fs.open) for file in files]
        self.common_metadata = self._footer(self.common_metadata_path)
        self.metadata = self._footer(self.metadata_path)
        if filters is not None:
            self.pieces = [piece for piece in self.pieces if self._passes(piece, _conjunctions(filters))]

    def _walked(self, folder: str) -> list[ParquetDatasetPiece]:
        self.partitions = ParquetPartitions()
        base = "/" + folder.strip("/") + "/"
        pieces = []
        for path in sorted(self.fs.find(folder)):
            # Some file systems hand out paths with a protocol, and some without the first slash.
            *above, file = ("/" + path).partition(base)[2].split("/")
            if file in ("_common_metadata", "_metadata") and not above:
                setattr(self, f"{file[1:]}_path", posixpath.join(folder, file))
            if any(_hidden(part) and "=" not in part for part in above) or _hidden(file) or _marker(file):
                continue
            keys = []
            for level, part in enumerate(part for part in above if "=" in part):
                name, _, value = part.partition("=")
                keys.append((name, self.partitions.get_index(level, name, unquote(value))))
            pieces.append(ParquetDatasetPiece(posixpath.join(folder, *above, file), self.fs.open, None, None, keys))
        return pieces

    def _footer(self, path: str | None) -> Any:
        if path is None:
            return None
        with self.fs.open(path) as source:
            return pq.read_metadata(source)

    def _passes(self, piece: ParquetDatasetPiece, conjunctions: list[list[Any]]) -> bool:
        names = self.partitions.partition_names if self.partitions is not None else set()
        for name, _, _ in (term for conjunction in conjunctions for term in conjunction):
            if name not in names:
                # Petastorm hands them to pyarrow, which then passed over them: rows came that nobody had asked for.
                raise ValueError(
                    f"petastorm's filters choose folders, and {name!r} is none of the partitions {sorted(names)}; "
                    "use predicate= for rows"
                )
        assert self.partitions is not None
        values = {
            name: self.partitions[level].dictionary[index].as_py()
            for level, (name, index) in enumerate(piece.partition_keys)
        }
        return any(all(_holds(values[name], how, wanted) for name, how, wanted in one) for one in conjunctions)


def _with_fsspec(filesystem: Any) -> Any:
    if filesystem is None:
        return local_type()()
    if isinstance(filesystem, pa.fs.FileSystem):
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(filesystem)
    return filesystem


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _marker(name: str) -> bool:
    return name.endswith((".crc", "_$folder$"))


def _conjunctions(filters: Any) -> list[list[Any]]:
    return [list(filters)] if filters and isinstance(filters[0], tuple) else [list(one) for one in filters]


def _holds(value: Any, how: str, wanted: Any) -> bool:
    if how in ("in", "not in"):
        kinds = {type(one) for one in wanted}
        found = any(kind(value) in wanted for kind in kinds)
        return found == (how == "in")
    value = type(wanted)(value)
    held: bool = {
        "=": value == wanted,
        "==": value == wanted,
        "!=": value != wanted,
        "<": value < wanted,
        ">": value > wanted,
        "<=": value <= wanted,
        ">=": value >= wanted,
    }[how]
    return held
