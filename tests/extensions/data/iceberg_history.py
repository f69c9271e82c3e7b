"""``IcebergHistory``: an Iceberg table that pyiceberg changes at random, with the rows that it must have.

pyiceberg writes neither position deletes nor deletion vectors, so these are written here, as Spark does.
"""

from __future__ import annotations

import json
import random
import struct
import uuid
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.schema import Schema
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.types import DoubleType, IntegerType, LongType, NestedField, StringType, StructType

from lagom.extensions.data.sources.mapped_columns import described_by_id
from tests.extensions.data.deletion_vectors import bitmap

_PATH, _POSITION = 2147483546, 2147483545
"""Ids of the columns of a position delete file."""


class IcebergHistory:
    """A table and its commits.

    Args:
        folder: folder of the warehouse.
        seed: of the random choices.
        is_partitioned: whether files are in partitions by the column "part".
    """

    def __init__(self, folder: Path, seed: int, *, is_partitioned: bool = False) -> None:
        folder.mkdir()
        self.random = random.Random(seed)
        catalog = SqlCatalog("test", uri="sqlite:///:memory:", warehouse=folder.as_uri())
        catalog.create_namespace("n")
        inner = StructType(NestedField(10, "a", LongType()), NestedField(11, "b", LongType()))
        schema = Schema(
            NestedField(1, "id", LongType()),
            NestedField(2, "part", StringType()),
            NestedField(3, "x", DoubleType()),
            NestedField(4, "text", StringType()),
            NestedField(5, "s", inner),
        )
        self.table: Any = catalog.create_table("n.t", schema, properties={"format-version": "2"})
        if is_partitioned:
            with self.table.update_spec() as update:
                update.add_field("part", IdentityTransform())
        self._rows: dict[int, dict[str, Any]] = {}
        self._next_id = 0
        self._num_names = 0
        self._dropped: list[str] = []
        self._masked: Path | None = None

    @property
    def folder(self) -> Path:
        """The present metadata file."""
        return self._masked or Path(self.table.metadata_location.removeprefix("file://"))

    @property
    def fields(self) -> list[Any]:
        """The columns; each has its "name", and its "type", which for a struct is a dict with its "fields"."""
        return list(described_by_id(self.table.schema().as_struct())[0].values())

    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows that the table must have, by their "id"."""
        return self._rows

    def run(self, num_commits: int) -> None:
        """Make random commits; the first one appends."""
        self._append()
        steps = (
            self._append,
            self._append,
            self._delete,
            self._overwrite,
            self._rename,
            self._drop,
            self._add,
            self._nest,
        )
        for _ in range(num_commits):
            self.random.choice((*steps, self._widen, self._repartition))()
        if not self._rows:
            self._append()

    def _value(self, kind: Any) -> Any:
        if self.random.random() < 0.15:
            return None
        if isinstance(kind, StructType):
            return {field.name: self._value(field.field_type) for field in kind.fields}
        if isinstance(kind, StringType):
            return self.random.choice("abc")
        return self.random.randrange(100) / 4 if isinstance(kind, DoubleType) else self.random.randrange(1000)

    def _made(self, num: int) -> pa.Table:
        schema = self.table.schema()
        rows = []
        for _ in range(num):
            rows.append({field.name: self._value(field.field_type) for field in schema.fields} | {"id": self._next_id})
            self._next_id += 1
        self._rows |= {row["id"]: row for row in rows}
        return pa.Table.from_pylist(rows, schema=schema_to_pyarrow(schema, include_field_ids=False))

    def _append(self) -> None:
        self.table.append(self._made(self.random.randint(1, 9)))

    def _range(self) -> tuple[int, int]:
        first = self.random.randrange(self._next_id)
        return first, first + self.random.randint(1, 4)

    def _forget(self, first: int, last: int) -> None:
        self._rows = {one: row for one, row in self._rows.items() if not first <= one < last}

    def _delete(self) -> None:
        first, last = self._range()
        if not any(first <= one < last for one in self._rows):
            return
        self.table.delete(f"id >= {first} and id < {last}")
        self._forget(first, last)

    def _overwrite(self) -> None:
        first, last = self._range()
        if not any(first <= one < last for one in self._rows):
            return
        self._forget(first, last)
        self.table.overwrite(self._made(2), f"id >= {first} and id < {last}")

    def _others(self) -> list[str]:
        return [field.name for field in self.table.schema().fields if field.name not in ("id", "part")]

    def _name(self) -> str:
        if self._dropped and self.random.random() < 0.5:
            return self._dropped.pop()  # a column of another type may have had the name
        self._num_names += 1
        return f"n{self._num_names}"

    def _rename(self) -> None:
        if others := self._others():
            before, after = self.random.choice(others), self._name()
            with self.table.update_schema() as update:
                update.rename_column(before, after)
            for row in self._rows.values():
                row[after] = row.pop(before)

    def _drop(self) -> None:
        if len(others := self._others()) > 1:
            name = self.random.choice(others)
            with self.table.update_schema() as update:
                update.delete_column(name)
            self._dropped.append(name)
            for row in self._rows.values():
                del row[name]

    def _add(self) -> None:
        name = self._name()
        with self.table.update_schema() as update:
            update.add_column(name, self.random.choice((IntegerType(), DoubleType(), StringType())))
        for row in self._rows.values():
            row[name] = None

    def _nest(self) -> None:
        """Rename a field of a struct, and add one."""
        structs = [field for field in self.table.schema().fields if isinstance(field.field_type, StructType)]
        for field in structs:
            before, after, added = self.random.choice(field.field_type.fields).name, self._name(), self._name()
            if {after, added} & {one.name for one in field.field_type.fields}:
                continue
            with self.table.update_schema() as update:
                update.rename_column((field.name, before), after).add_column((field.name, added), LongType())
            for row in self._rows.values():
                if (inner := row[field.name]) is not None:
                    inner[after] = inner.pop(before)
                    inner[added] = None

    def _widen(self) -> None:
        for field in self.table.schema().fields:
            if isinstance(field.field_type, IntegerType):
                with self.table.update_schema() as update:
                    update.update_column(field.name, LongType())

    def _repartition(self) -> None:
        """Change the partitions: files that are there stay in theirs."""
        fields = self.table.spec().fields
        with self.table.update_spec() as update:
            if any(not isinstance(part.transform, VoidTransform) for part in fields):
                update.remove_field(fields[0].name)
            else:
                self._num_names += 1
                update.add_field("part", IdentityTransform(), f"p{self._num_names}")

    def mask(self, ids: Collection[int], *, by_vector: bool = False) -> None:
        """Delete rows by delete files, one for each data file: position deletes, or deletion vectors.

        The result is a metadata file of its own, which the catalog does not know.
        """
        table, folder = self.table, Path(self.table.location().removeprefix("file://"))
        snapshot = table.current_snapshot()
        assert snapshot is not None
        number, following = random.getrandbits(62), table.metadata.last_sequence_number + 1
        made = list(self._delete_files(ids, folder, by_vector))
        manifests = snapshot.manifests(table.io)
        for spec_id in {spec_id for spec_id, _ in made}:
            output = table.io.new_output(f"{table.location()}/metadata/{uuid.uuid4()}.avro")
            with _DeletesWriter(table.specs()[spec_id], table.schema(), output, number, "null") as writer:
                for file in (file for of, file in made if of == spec_id):
                    writer.add_entry(
                        ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=number, data_file=file)
                    )
            manifests.append(writer.to_manifest_file())
        listed = f"{table.location()}/metadata/snap-{uuid.uuid4()}.avro"
        with write_manifest_list(
            2, table.io.new_output(listed), number, snapshot.snapshot_id, following, "null"
        ) as writer_of_list:
            writer_of_list.add_manifests(manifests)
        now = Snapshot.model_validate(
            {
                "snapshot-id": number,
                "parent-snapshot-id": snapshot.snapshot_id,
                "sequence-number": following,
                "timestamp-ms": snapshot.timestamp_ms + 1,
                "manifest-list": listed,
                "summary": {"operation": "delete"},
                "schema-id": table.schema().schema_id,
            }
        )
        main = table.metadata.refs["main"].model_copy(update={"snapshot_id": number})
        changed = {
            "snapshots": [*table.metadata.snapshots, now],
            "current_snapshot_id": number,
            "last_sequence_number": following,
            "refs": {"main": main},
        }
        self._masked = folder / "metadata" / f"{uuid.uuid4()}.metadata.json"
        metadata = table.metadata.model_copy(update=changed)
        ToOutputFile.table_metadata(metadata, table.io.new_output(self._masked.as_uri()))
        self._rows = {one: row for one, row in self._rows.items() if one not in ids}

    def _delete_files(self, ids: Collection[int], folder: Path, by_vector: bool) -> Iterator[tuple[int, DataFile]]:
        for task in self.table.scan().plan_files():
            place = task.file.file_path
            stored = pq.read_table(place.removeprefix("file://"), columns=["id"])["id"].to_pylist()
            rows = [row for row, one in enumerate(stored) if one in ids]
            if not rows:
                continue
            path = folder / "data" / f"{uuid.uuid4()}-deletes.{'puffin' if by_vector else 'parquet'}"
            if by_vector:
                path.write_bytes(_puffin(place, rows))
            else:
                columns = {"file_path": (pa.string(), _PATH, [place] * len(rows)), "pos": (pa.int64(), _POSITION, rows)}
                schema = pa.schema(
                    [
                        pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(number)})
                        for name, (kind, number, _) in columns.items()
                    ]
                )
                pq.write_table(pa.table({name: values for name, (*_, values) in columns.items()}, schema=schema), path)
            bound = place.encode()
            yield (
                task.file.spec_id,
                DataFile.from_args(
                    content=DataFileContent.POSITION_DELETES,
                    file_path=path.as_uri(),
                    file_format=FileFormat.PUFFIN if by_vector else FileFormat.PARQUET,
                    partition=task.file.partition,
                    record_count=len(rows),
                    file_size_in_bytes=path.stat().st_size,
                    lower_bounds={_PATH: bound},
                    upper_bounds={_PATH: bound},
                ),
            )


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def _puffin(place: str, rows: Collection[int]) -> bytes:
    """A Puffin file with the deletion vector of one data file; https://iceberg.apache.org/puffin-spec/."""
    vector = bitmap(rows)
    blob = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
    told = {
        "type": "deletion-vector-v1",
        "fields": [],
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": 4,
        "length": len(blob),
        "properties": {"referenced-data-file": place, "cardinality": str(len(rows))},
    }
    footer = json.dumps({"blobs": [told], "properties": {}}).encode()
    return b"PFA1" + blob + b"PFA1" + footer + struct.pack("<I", len(footer)) + bytes(4) + b"PFA1"
