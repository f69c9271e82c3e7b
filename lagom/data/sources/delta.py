"""``snapshot``: finds the current files of a Delta table, from its log, with the package deltalake."""

from __future__ import annotations

import datetime
import json
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from lagom.data.column_types.unischema import UnischemaField
from lagom.errors import DataError, LagomError

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG = "_delta_log"
_FEATURES = {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
"""Reader features that lagom knows. Tables that really use column mapping or deletion vectors are refused."""
_WANTED = ("path", "size_bytes", "partition")
_REMEDY = "have Spark write the current rows as Parquet, or give the list of current files"


@dataclass(frozen=True)
class DeltaSnapshot:
    """The current version of a Delta table."""

    files: list[tuple[str, int, tuple[tuple[str, str | None], ...]]]
    """Path below the folder, size in bytes and partition of each current file."""
    kinds: Mapping[str, UnischemaField]
    """Types of the partition columns."""
    names: list[str]
    """Names of all columns."""


def snapshot(home: Any, folder: str) -> DeltaSnapshot | None:
    """Read the current version of the Delta table in ``folder``; return None if it is not a Delta table.

    Args:
        home: pyarrow's file system.

    Raises:
        DataError: if the log cannot be read, or the table uses features that lagom does not support.
        LagomError: if deltalake is not installed.
    """
    from pyarrow import fs

    try:
        if home.get_file_info(f"{folder}/{LOG}").type != fs.FileType.Directory:
            return None
    except OSError as error:
        raise DataError(f"{folder} cannot be reached: {error}") from error
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise LagomError(
            f"{folder} is a Delta table, whose log is read with deltalake: pip install 'lagom-spark[delta]'. Or make "
            "the ParquetDataset on a driver that has it, and hand it over (train_set=): ranks then need no deltalake"
        ) from error
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if home.type_name != "local":
                _copy_log(home, folder, scratch)
            table = DeltaTable(folder if home.type_name == "local" else scratch)
            _check_features(folder, table)
            return _snapshot(folder, table)
        except (DeltaError, OSError, ValueError) as error:
            first, *_ = [*str(error).splitlines(), repr(error)]
            raise _error(folder, f"has a log that deltalake cannot read: {first}") from error


def _copy_log(home: Any, folder: str, scratch: str) -> None:
    """Copy the log from its last checkpoint on, since deltalake cannot use pyarrow's file systems and credentials."""
    from pyarrow import fs

    log = f"{folder}/{LOG}"
    paths = [info.path for info in home.get_file_info(fs.FileSelector(log, recursive=True)) if info.is_file]
    start = 0
    if f"{log}/_last_checkpoint" in paths:
        with home.open_input_stream(f"{log}/_last_checkpoint") as source:
            start = json.loads(source.read())["version"]
    for path in paths:
        version, _, _ = path[len(log) + 1 :].partition(".")
        if not version.isdecimal() or int(version) >= start:
            copy = f"{scratch}/{LOG}{path[len(log) :]}"
            fs.LocalFileSystem().create_dir(copy.rpartition("/")[0])
            fs.copy_files(path, copy, source_filesystem=home, destination_filesystem=fs.LocalFileSystem())


def _check_features(folder: str, table: Any) -> None:
    """Check that reading the current files without further steps gives the table's rows and columns.

    Raises:
        DataError: for unknown features, column mapping and deletion vectors.
    """
    features = set(table.protocol().reader_features or ())
    if unknown := sorted(features - _FEATURES):
        raise _error(folder, f"asks for the features {unknown}, which lagom does not know; {_REMEDY}")
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise _error(folder, f"has its columns under other names in its files (column mapping by {mode}); {_REMEDY}")
    if "deletionVectors" in features and _has_deletion_vectors(table):
        raise _error(
            folder,
            "has deletion vectors: rows in its files that are deleted; have Spark write the files anew: "
            "REORG TABLE ... APPLY (PURGE)",
        )


def _has_deletion_vectors(table: Any) -> bool:
    from deltalake.exceptions import DeltaError

    try:
        return any(batch.num_rows for batch in table.deletion_vectors())
    except DeltaError:  # a deletion vector is in a file of its own, which cannot be read from here
        return True


def _snapshot(folder: str, table: Any) -> DeltaSnapshot:
    import pyarrow as pa

    schema = pa.schema(table.schema().to_arrow())
    columns = table.metadata().partition_columns
    adds = pa.table(table.get_add_actions())
    files = []
    for add in adds.select([name for name in _WANTED if name in adds.column_names]).to_pylist():
        path = add["path"]
        if "://" in path or path.startswith("/"):
            raise _error(folder, f"has files outside of its folder ({path}), as a shallow clone has; name the table")
        partition = tuple((name, _text(add["partition"][name])) for name in columns)
        files.append((unquote(path), add["size_bytes"], partition))
    kinds = {name: UnischemaField(name, _dtype(schema.field(name).type), (), None, nullable=True) for name in columns}
    return DeltaSnapshot(files, kinds, schema.names)


def _text(value: Any) -> str | None:
    """Return a partition's value as text, without a time zone; None for null."""
    if isinstance(value, datetime.datetime):
        value = value.replace(tzinfo=None)
    return None if value is None else str(value)


def _dtype(kind: Any) -> np.dtype[Any]:
    """Return the type of a partition column: numbers and dates keep their types, all others are read as texts."""
    from pyarrow import types as t

    if t.is_date(kind):
        return np.dtype("datetime64[D]")
    is_number = t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind)
    return np.dtype(kind.to_pandas_dtype() if is_number else np.str_)


def _error(folder: str, why: str) -> DataError:
    return DataError(f"the Delta table {folder} {why}")
