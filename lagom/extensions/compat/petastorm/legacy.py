"""The data sets and file systems of pyarrow before version 15, as far as petastorm uses them."""

from __future__ import annotations

import operator
import posixpath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def local_type() -> Any:
    """Return fsspec's class of local file systems, which has the methods of the class that pyarrow has dropped."""
    from fsspec.implementations.local import LocalFileSystem

    return LocalFileSystem


def _delegate(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self._hdfs, name)(*args, **options)

    method.__name__ = name
    return method


class HadoopFileSystem:
    """Base class of petastorm's client for several name nodes; passes method calls on to a connection."""

    _hdfs: Any

    for _name in ("open", "exists", "isdir", "isfile", "info", "ls", "find", "walk", "mkdir", "rm", "delete"):
        locals()[_name] = _delegate(_name)


def connect(
    host: str = "default",
    port: int = 0,
    user: str | None = None,
    kerb_ticket: str | None = None,
    driver: str = "libhdfs",
    extra_conf: dict[str, str] | None = None,
) -> Any:
    """Connect to HDFS. ``driver`` is ignored: pyarrow has only one."""
    del driver
    from fsspec.implementations import arrow

    return arrow.HadoopFileSystem(host=host, port=port, user=user, kerb_ticket=kerb_ticket, extra_conf=extra_conf)


class PartitionSet:
    """Partition values of one level of folders."""

    def __init__(self, name: str, keys: list[str] | None = None) -> None:
        self.name = name
        self.keys = keys or []

    def get_index(self, key: str) -> int:
        """Return the number of ``key``, which is added if it is new."""
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)

    @property
    def dictionary(self) -> Any:
        """Return the values as an Arrow array, of integers if all are integers."""
        try:
            return pa.array([int(key) for key in self.keys])
        except ValueError:
            return pa.array(self.keys, pa.string())


class ParquetPartitions:
    """Levels of folders that stand for columns."""

    def __init__(self) -> None:
        self.levels: list[PartitionSet] = []
        self.partition_names: set[str] = set()

    def __len__(self) -> int:
        return len(self.levels)

    def __getitem__(self, level: int) -> PartitionSet:
        return self.levels[level]

    def get_index(self, level: int, name: str, key: str) -> int:
        """Return the number of a partition value at a level.

        Raises:
            ValueError: if the level has another name.
        """
        if level == len(self.levels):
            self.levels.append(PartitionSet(name))
            self.partition_names.add(name)
        if self.levels[level].name != name:
            raise ValueError(f"folders of partitions {self.levels[level].name!r} and {name!r} lie side by side")
        return self.levels[level].get_index(key)


class ParquetDatasetPiece:
    """A file or one of its row groups."""

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
        """Read the footer of the file."""
        with self._source() as source:
            return pq.ParquetFile(source, **self.file_options).metadata

    def read(
        self,
        columns: Iterable[str] | None = None,
        use_threads: bool = True,
        partitions: ParquetPartitions | None = None,
        **options: Any,
    ) -> Any:
        """Read the rows as a table, with a dictionary column for each partition.

        Raises:
            ValueError: if this piece has partition keys, and ``partitions`` is None.
        """
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
    """Lists the files of a folder or a list; reads only ``_metadata`` and ``_common_metadata`` of a folder.

    Args:
        filters: conditions on partitions, by which files are chosen: a list of (name, operator, value), which must all
            hold, or a list of such lists, of which one must hold.

    Raises:
        OSError: if a file does not exist.
        ValueError: for a filter on a column that is no partition.
    """

    def __init__(
        self,
        path_or_paths: Any,
        filesystem: Any = None,
        validate_schema: bool = True,
        filters: Any = None,
        metadata_nthreads: int = 1,
    ) -> None:
        del validate_schema, metadata_nthreads
        self.fs = _to_fsspec(filesystem)
        is_one = isinstance(path_or_paths, str) or (len(path_or_paths) == 1 and self.fs.isdir(path_or_paths[0]))
        self.paths = path_or_paths
        self.partitions: ParquetPartitions | None = None
        self.common_metadata_path: str | None = None
        self.metadata_path: str | None = None
        one = path_or_paths if isinstance(path_or_paths, str) else path_or_paths[0]
        if is_one and self.fs.isdir(one):
            self.pieces = self._list_pieces(one.rstrip("/"))
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

    def _list_pieces(self, folder: str) -> list[ParquetDatasetPiece]:
        self.partitions = ParquetPartitions()
        base = "/" + folder.strip("/") + "/"
        pieces = []
        for path in sorted(self.fs.find(folder)):
            # Some file systems hand out paths with a protocol, and some without the first slash.
            *above, file = ("/" + path).partition(base)[2].split("/")
            if file in ("_common_metadata", "_metadata") and not above:
                setattr(self, f"{file[1:]}_path", posixpath.join(folder, file))
            if any(_is_hidden(part) and "=" not in part for part in above) or _is_hidden(file) or _is_marker(file):
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
                # pyarrow used to ignore such filters, so petastorm returned rows that the filters exclude.
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


def _to_fsspec(filesystem: Any) -> Any:
    if filesystem is None:
        return local_type()()
    if isinstance(filesystem, pa.fs.FileSystem):
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(filesystem)
    return filesystem


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _is_marker(name: str) -> bool:
    return name.endswith((".crc", "_$folder$"))


def _conjunctions(filters: Any) -> list[list[Any]]:
    return [list(filters)] if filters and isinstance(filters[0], tuple) else [list(one) for one in filters]


def _holds(value: Any, how: str, wanted: Any) -> bool:
    if how in ("in", "not in"):
        kinds = {type(one) for one in wanted}
        found = any(kind(value) in wanted for kind in kinds)
        return found == (how == "in")
    return bool(_COMPARE[how](type(wanted)(value), wanted))


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
