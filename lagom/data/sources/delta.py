"""Delta tables: which files are current, by the log. Source: the Delta transaction log protocol, PROTOCOL.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np

from lagom.data.columns.unischema import UnischemaField
from lagom.errors import DataError

LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_FEATURES = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",  # its mode says whether it is used
    "deletionVectors",  # and files say this
    "domainMetadata",
    "generatedColumns",
    "invariants",
    "timestampNtz",
    "v2Checkpoint",  # and the names of checkpoints this
    "vacuumProtocolCheck",
}
_KINDS: dict[str, Any] = {
    "string": np.str_,
    "byte": np.int8,
    "short": np.int16,
    "integer": np.int32,
    "long": np.int64,
    "float": np.float32,
    "double": np.float64,
    "boolean": np.bool_,
    "date": "datetime64[D]",
}
"""Of columns that folders stand for; others are texts."""


@dataclass
class DeltaSnapshot:
    """What the log says of the table as it is now."""

    folder: str
    adds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The current files, by their path in the log."""
    metadata: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)

    def apply(self, action: dict[str, Any]) -> None:
        """Take one action of the log."""
        if action.get("add") is not None:
            self.adds[action["add"]["path"]] = action["add"]
        elif action.get("remove") is not None:
            self.adds.pop(action["remove"]["path"], None)
        elif action.get("metaData") is not None:
            self.metadata = action["metaData"]
        elif action.get("protocol") is not None:
            self.protocol = action["protocol"]
        elif action.get("sidecar") is not None:
            raise self.error(f"keeps its checkpoint in several files of version 2; {_REMEDY}")

    def files(self) -> list[tuple[str, int, tuple[tuple[str, str | None], ...]]]:
        """Path below the folder, size and partition of each current file.

        Raises:
            DataError: where they alone do not say which rows are current.
        """
        columns = list(self.metadata["partitionColumns"])
        found = []
        for path, add in self.adds.items():
            if add.get("deletionVector"):
                raise self.error(
                    f"has deletion vectors ({path}): rows in its files that are deleted; "
                    "have Spark write the files anew: REORG TABLE ... APPLY (PURGE)"
                )
            if "://" in path or path.startswith("/"):
                raise self.error(f"has files outside of its folder ({path}), as a shallow clone has; name the table")
            values = dict(add["partitionValues"] or {})
            # An empty text stands for a null.
            partition = tuple((name, values.get(name) or None) for name in columns)
            found.append((unquote(path), int(add["size"]), partition))
        return found

    def kinds(self) -> dict[str, UnischemaField]:
        """The types of the columns that folders stand for."""
        told = {one["name"]: one["type"] for one in json.loads(self.metadata["schemaString"])["fields"]}
        return {
            name: UnischemaField(name, np.dtype(_KINDS.get(str(told.get(name)), np.str_)), (), None, nullable=True)
            for name in self.metadata["partitionColumns"]
        }

    def names(self) -> list[str]:
        """All columns."""
        return [one["name"] for one in json.loads(self.metadata["schemaString"])["fields"]]

    def check(self) -> None:
        """Make sure that this reader knows all that the table asks of readers.

        Raises:
            DataError: otherwise.
        """
        if not self.metadata or not self.protocol:
            raise self.error("has a log without metadata or protocol: it is no complete Delta table")
        version = int(self.protocol["minReaderVersion"])
        unknown = sorted(set(self.protocol.get("readerFeatures") or ()) - _FEATURES)
        if version > 3 or unknown:
            wanted = f"the features {unknown}" if unknown else f"readers of version {version}"
            raise self.error(f"asks for {wanted}, which lagom does not know; {_REMEDY}")
        mode = dict(self.metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none")
        if mode != "none":
            raise self.error(f"has its columns under other names in its files (column mapping by {mode}); {_REMEDY}")

    def error(self, why: str) -> DataError:
        """The error for this table."""
        return DataError(f"the Delta table {self.folder} {why}")


_REMEDY = "have Spark write the current rows as Parquet, or give the list of current files"


def snapshot(home: Any, folder: str) -> DeltaSnapshot | None:
    """The table in ``folder`` as it is now, by its last checkpoint and the commits after it; None where it is none.

    Raises:
        DataError: when the log is incomplete, or says something that this reader does not know.
    """
    from pyarrow import fs

    log = f"{folder}/{LOG}"
    try:
        if home.get_file_info(log).type != fs.FileType.Directory:
            return None
        names = {info.path.rsplit("/", 1)[-1] for info in home.get_file_info(fs.FileSelector(log))}
    except OSError as error:
        raise DataError(f"{folder} cannot be reached: {error}") from error
    found = DeltaSnapshot(folder)
    start, parts = _last_checkpoint(names)
    commits = sorted(int(matched[1]) for name in names if (matched := _COMMIT.fullmatch(name)))
    commits = [version for version in commits if version > start]
    if not parts and not commits:
        raise found.error(f"has no commits in {LOG}: it is empty, or was not written to its end")
    if commits and commits != list(range(start + 1, start + 1 + len(commits))):
        missing = next(version for at, version in enumerate(range(start + 1, commits[-1])) if commits[at] != version)
        raise found.error(f"lacks version {missing} in its log; without it nobody knows which files are current")
    try:
        for name in parts:
            for action in _of_checkpoint(home, f"{log}/{name}"):
                found.apply(action)
        for version in commits:
            for action in _of_commit(home, f"{log}/{version:020}.json"):
                found.apply(action)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise found.error(f"has a log that cannot be read: {error!r}") from error
    found.check()
    return found


def _last_checkpoint(names: set[str]) -> tuple[int, list[str]]:
    """Version and files of the newest checkpoint that is whole; -1 where there is none."""
    whole: dict[int, list[str]] = {}
    for name in sorted(names):
        if matched := _CHECKPOINT.fullmatch(name):
            version = int(matched[1])
            if matched[2] is None:
                whole[version] = [name]
                continue
            parts = [
                f"{matched[1]}.checkpoint.{part:010}.{matched[3]}.parquet" for part in range(1, int(matched[3]) + 1)
            ]
            if version not in whole and names.issuperset(parts):
                whole[version] = parts
    newest = max(whole, default=-1)
    return newest, whole.get(newest, [])


def _of_checkpoint(home: Any, path: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    kinds = ("add", "metaData", "protocol", "sidecar")
    with home.open_input_file(path) as source:
        file = pq.ParquetFile(source)
        columns = [name for name in kinds if name in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield {name: action for name, action in row.items() if action is not None}


def _of_commit(home: Any, path: str) -> Iterator[dict[str, Any]]:
    with home.open_input_stream(path) as source:
        text = source.read().decode()
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)
