"""``locate``: finds the files of a data set by paths and URLs, with partitions; refuses folders with stale files."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from lagom.errors import DataError, LagomError
from lagom.extensions.data.sources import delta, iceberg, spark_stream_log

if TYPE_CHECKING:
    from lagom.extensions.data.sources.table_snapshot import TableSnapshot

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_CREDENTIALS = {
    "s3": "credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the machine's role",
    "gs": "credentials come from GOOGLE_APPLICATION_CREDENTIALS, gcloud or the machine; gs://anonymous@... is without",
    "abfs": "credentials come from AZURE_* variables, az login or the machine, or filesystem=fs.AzureFileSystem(...)",
    "hdfs": "libhdfs is found by HADOOP_HOME, Java by JAVA_HOME, and Hadoop by CLASSPATH=$(hadoop classpath --glob)",
}
_GCS_SECONDS = 60
"""Seconds after which pyarrow gives up on Google's store; its default is 15 minutes."""


@dataclass(frozen=True)
class DataFile:
    """Path, size and partition values of one file of a data set."""

    path: str
    name: str
    """Path below the data set's folder, which is the same wherever the folder is mounted."""
    size: int
    """Size in bytes."""
    partition: tuple[tuple[str, str | None], ...]
    """Names and values of the partition columns, from the names of the file's folders or from a Delta log."""

    def value(self, field: Any) -> Any:
        """Return the value of the partition column ``field`` as an Arrow scalar of its type."""
        import pyarrow as pa

        text = dict(self.partition)[field.name]
        return pa.scalar(None, field.type) if text is None else pa.scalar(text).cast(field.type)


def arrow() -> Any:
    """Import and return pyarrow.

    Raises:
        LagomError: if pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise LagomError('Parquet is read with pyarrow: pip install "lagom-spark[data]"') from error
    return pa


@dataclass(frozen=True)
class Location:
    """The file system and the files of a data set."""

    home: Any
    """pyarrow's file system."""
    folder: str | None
    """The folder, if the data set is a single folder; else None."""
    files: list[DataFile]
    """The files, source by source, and within a folder in the order of their names."""
    table: TableSnapshot | None = None
    """What the log or metadata says of columns and rows, if the data set is a Delta or Iceberg table; else None."""


def locate(sources: list[str], filesystem: Any = None) -> Location:
    """Find the files of ``sources``, which are paths or URLs of folders or files.

    Args:
        filesystem: pyarrow's or fsspec's file system; None to choose it by the URL.

    Raises:
        DataError: if a source does not exist, cannot be reached or is empty, or is a table that lagom cannot read: of
            Hudi, with unsupported features of Delta or Iceberg, or a folder inside a Delta table.
        LagomError: for a Delta table, if deltalake is not installed; for an Iceberg table, if pyiceberg is not.
        ValueError: if the sources are in two file systems, or one of several is a Delta or Iceberg table.
    """
    from pyarrow import ArrowException

    try:
        return _located(sources, filesystem)
    except ArrowException as error:  # clients of object stores raise errors that have only this class
        raise DataError(f"{sources[0]} cannot be reached: {_first_line(error)}{_remedy(sources[0])}") from error


def _located(sources: list[str], filesystem: Any) -> Location:
    places = [file_system_of(source, filesystem) for source in sources]
    home = places[0][0]
    for source, (other, _) in zip(sources, places, strict=True):
        if not other.equals(home):
            raise ValueError(f"{source} and {sources[0]} are in two file systems; a data set is in one")
    folders = [path.rstrip("/") for _, path in places]
    tables = [_table(home, folder) for folder in folders]
    if len(tables) > 1 and any(tables):
        raise ValueError(f"{sources} are tables of Delta or Iceberg, which are read one at a time")
    if tables[0] is not None:
        folder, table = tables[0]
        current = [DataFile(f"{folder}/{name}", name, size, values) for name, size, values in sorted(table.files)]
        if not current:
            raise DataError(f"{sources[0]} has no rows: no file of this table is current")
        return Location(home, folder, current, table)
    files = [file for source, (_, path) in zip(sources, places, strict=True) for file in _files(home, path, source)]
    for file in files:
        if not file.size:
            raise DataError(f"{file.path} is empty: it was not written to its end, and is no Parquet file")
    is_folder = len(places) == 1 and files[0].path != places[0][1]
    return Location(home, places[0][1] if is_folder else None, files)


def _table(home: Any, path: str) -> tuple[str, TableSnapshot] | None:
    """Return the folder and version of a Delta or Iceberg table; None if ``path`` is none."""
    if path.endswith(iceberg.METADATA):
        return iceberg.snapshot(home, path)
    found = delta.snapshot(home, path)
    return iceberg.snapshot(home, path) if found is None else (path, found)


def file_system_of(source: str, filesystem: Any = None) -> tuple[Any, str]:
    """Return the file system of ``source``, which is ``filesystem`` if given, and the path in it.

    Raises:
        DataError: if neither pyarrow nor fsspec can open the URL.
    """
    from pyarrow import fs

    if filesystem is not None:
        if not isinstance(filesystem, fs.FileSystem):
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        return filesystem, source
    source = _as_pyarrow_says(source)
    scheme = urlsplit(source).scheme
    if len(scheme) < 2:  # no scheme, or the letter of a drive
        import os

        return fs.LocalFileSystem(), os.path.abspath(source)
    try:
        system_and_path: tuple[Any, str] = fs.FileSystem.from_uri(source)
        return system_and_path
    except (ValueError, OSError) as error:
        try:
            import fsspec

            other, path = fsspec.core.url_to_fs(source)
        except (ImportError, ValueError, OSError) as second:
            told = f"{_first_line(error)} ({_first_line(second)})"
            raise DataError(f"{source} cannot be opened: {told}{_remedy(source)}") from error
        return fs.PyFileSystem(fs.FSSpecHandler(other)), path


def _files(home: Any, path: str, source: str) -> list[DataFile]:
    from pyarrow import fs

    try:
        info = home.get_file_info(path)
    except OSError as error:
        raise DataError(f"{source} cannot be reached: {error}{_remedy(source)}") from error
    if info.type == fs.FileType.NotFound:
        raise DataError(f"{source} does not exist (as seen from this machine)")
    if info.type == fs.FileType.File:
        return [DataFile(path, posixpath.basename(path), info.size, ())]
    path = path.rstrip("/")
    try:
        _refuse_parts(home, path, source)
        infos = home.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise DataError(f"{source} cannot be listed: {error}") from error
    below = {one.path: one.path[len(path) + 1 :] for one in infos}
    _refuse_tables(set(below.values()), source)
    committed = spark_stream_log.committed_files(home, path, set(below.values()))
    files = [
        DataFile(one.path, below[one.path], one.size, _partition(below[one.path]))
        for one in infos
        if one.type == fs.FileType.File and not _hidden(below[one.path])
        if committed is None or below[one.path] in committed
    ]
    if not files:
        raise DataError(f"{source} holds no data files, {len(infos)} entries in all")
    return sorted(files, key=lambda file: file.name)


def _as_pyarrow_says(source: str) -> str:
    """Return the URL ``source`` in pyarrow's spelling (Spark has other schemes); limit retries in Google's store."""
    source = re.sub(r"^s3[an]://", "s3://", source)
    source = re.sub(r"^dbfs:/+", "/dbfs/", source)
    if urlsplit(source).scheme in ("gs", "gcs") and "retry_limit_seconds" not in source:
        source += f"{'&' if '?' in source else '?'}retry_limit_seconds={_GCS_SECONDS}"
    return source


def _first_line(error: Exception) -> str:
    """Return the first line of ``error``; an error about libhdfs or Java goes on to list 80 places."""
    return (str(error).splitlines() or [repr(error)])[0]


def _remedy(source: str) -> str:
    kinds = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "viewfs": "hdfs"}
    scheme = urlsplit(source).scheme
    told = _CREDENTIALS.get(kinds.get(scheme, scheme))
    return f" ({told})" if told else ""


def _hidden(name: str) -> bool:
    """Return whether Spark ignores the file: a part of its path begins with "." or, unless a partition, with "_"."""
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in name.split("/"))


def _refuse_parts(home: Any, path: str, source: str) -> None:
    """Raise a DataError if ``path`` is a partition's folder inside a Delta table, or the data of an Iceberg table."""
    from pyarrow import fs

    while "=" in (name := posixpath.basename(path)) or name == "data":
        path = posixpath.dirname(path)
        metadata = home.get_file_info(fs.FileSelector(f"{path}/metadata", allow_not_found=True))
        has_log = home.get_file_info(f"{path}/{delta.LOG}").type == fs.FileType.Directory
        if has_log or any(one.path.endswith(iceberg.METADATA) for one in metadata):
            kind, what = ("Delta", "log") if has_log else ("Iceberg", "metadata")
            raise DataError(
                f"{source} is a part of the {kind} table {path}, whose {what} tells which of its files are current; "
                "name the table, and the part by filters="
            )


def _refuse_tables(names: set[str], source: str) -> None:
    if ".hoodie" in {name.split("/")[0] for name in names}:
        raise DataError(
            f"{source} is a Hudi table: its folder holds files that are no longer current, which only its log tells; "
            "have Spark write the current rows as Parquet, or give the list of current files"
        )
    if any(name.startswith("metadata/") and name.endswith(".metadata.json") for name in names):
        raise DataError(
            f"{source} is an Iceberg table with a catalog, which knows the current metadata file: name this file "
            "in place of the folder (load_table(NAME).metadata_location of pyiceberg's catalog, or the last row of "
            "NAME.metadata_log_entries in Spark)"
        )


def _partition(name: str) -> tuple[tuple[str, str | None], ...]:
    found = []
    for folder in name.split("/")[:-1]:
        key, is_partition, value = folder.partition("=")
        if is_partition:
            found.append((unquote(key), None if value == _NULL_PARTITION else unquote(value)))
    return tuple(found)
