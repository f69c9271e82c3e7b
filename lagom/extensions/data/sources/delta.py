"""``snapshot``: finds the current files of a Delta table, from its log, with the package deltalake."""

from __future__ import annotations

import datetime
import json
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from lagom.errors import DataError, LagomError
from lagom.extensions.data.column_types.unischema import UnischemaField
from lagom.extensions.data.sources.deletion_vectors import copy_vectors, deleted_rows
from lagom.extensions.data.sources.mapped_columns import MappedColumns
from lagom.extensions.data.sources.table_snapshot import TableSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

LOG = "_delta_log"
_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "variantType",
    "variantType-preview",
}
"""Reader features that lagom knows."""
_WANTED = ("path", "size_bytes", "partition")
_REMEDY = "pass Spark's DataFrame of the table in its place: train_set=spark.read.table(...)"


def snapshot(home: Any, folder: str) -> TableSnapshot | None:
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
    is_local = home.type_name == "local"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if not is_local:
                _copy_log(home, folder, scratch)
            table = DeltaTable(folder if is_local else scratch)
            _check_features(folder, table)
            table_snapshot = _snapshot(folder, table)
        except (DeltaError, OSError, ValueError) as error:
            why = f"has a log that deltalake cannot read: {_first_line(error)}; if Spark can read it, {_REMEDY}"
            raise _error(folder, why) from error
        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return table_snapshot
        try:
            if not is_local:
                copy_vectors(home, folder, scratch)
            return replace(table_snapshot, deleted=_checked(deleted_rows(table), table_snapshot))
        except (DeltaError, OSError, ValueError) as error:
            why = f"has a deletion vector that cannot be read: {_first_line(error)}; {_REMEDY}"
            raise _error(folder, why) from error


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
    """Check that lagom knows how to read the table's rows and columns.

    Raises:
        DataError: for features that lagom does not know.
    """
    features = set(table.protocol().reader_features or ())
    if unknown := sorted(features - _FEATURES):
        raise _error(folder, f"asks for the features {unknown}, which lagom does not know; {_REMEDY}")
    if (mode := _mapping_mode(table)) not in ("none", "name", "id"):
        raise _error(folder, f"has column mapping by {mode!r}, which lagom does not know; {_REMEDY}")


def _checked(deleted: Mapping[str, NDArray[np.int64]], found: TableSnapshot) -> Mapping[str, NDArray[np.int64]]:
    if unknown := sorted(set(deleted).difference(name for name, _, _ in found.files)):
        raise ValueError(f"it is of {unknown[0]}, which is no current file")
    return deleted


def _snapshot(folder: str, table: Any) -> TableSnapshot:
    import pyarrow as pa

    schema = pa.schema(table.schema().to_arrow())
    columns = table.metadata().partition_columns
    adds = pa.table(table.get_add_actions())
    files = []
    for add in adds.select([name for name in _WANTED if name in adds.column_names]).to_pylist():
        path = add["path"]
        if "://" in path or path.startswith("/"):
            why = (
                f"has files outside of its folder ({path}), as a shallow clone has; {_REMEDY}, or name the other table"
            )
            raise _error(folder, why)
        partition = tuple((name, _text(add["partition"][name])) for name in columns)
        files.append((unquote(path), add["size_bytes"], partition))
    kinds = {name: UnischemaField(name, _dtype(schema.field(name).type), (), None, nullable=True) for name in columns}
    types = {field.name: field.type for field in schema}
    return TableSnapshot("delta", files, kinds, types, _mapped(table, types, columns), {})


def _mapped(table: Any, types: Mapping[str, Any], partitions: list[str]) -> MappedColumns | None:
    if (mode := _mapping_mode(table)) == "none":
        return None
    fields = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    return MappedColumns({name: fields[name] for name in types if name not in partitions}, types, mode == "id")


def _mapping_mode(table: Any) -> str:
    protocol = table.protocol()
    if protocol.min_reader_version != 2 and "columnMapping" not in (protocol.reader_features or ()):
        return "none"  # the setting has no effect without the feature
    return str(table.metadata().configuration.get("delta.columnMapping.mode", "none"))


def _first_line(error: Exception) -> str:
    return [*str(error).splitlines(), repr(error)][0]


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
