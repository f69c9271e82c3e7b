"""``History``: a Delta table that random commits change, written by Delta's protocol, with the rows that it must have.

deltalake writes no deletion vectors, and renames no columns, so the files and the log are written here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.extensions.data import deletion_vectors

KINDS = {"long": pa.int64(), "integer": pa.int32(), "double": pa.float64(), "string": pa.string()}


class History:
    """A table and its commits.

    Args:
        folder: folder of the table.
        seed: of the random choices.
        mode: of column mapping: "none", "name" or "id".
        is_partitioned: whether files are in partitions by the column "part".
    """

    def __init__(self, folder: Path, seed: int, mode: str, *, is_partitioned: bool = False) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.mode = mode
        self.is_partitioned = is_partitioned
        self.version = 0
        self._next_id = 0
        self._num_fields = 0
        self.fields: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, Any]] = {}
        (folder / "_delta_log").mkdir(parents=True)
        for name, kind in {"id": "long", "part": "string", "x": "double", "text": "string"}.items():
            self._add_field(name, kind)
        inner = [self._field(name, "long") for name in ("a", "b")]
        self._add_field("s", {"type": "struct", "fields": inner})
        features = ["deletionVectors"] + ["columnMapping"] * (mode != "none")
        versions = {"minReaderVersion": 3, "minWriterVersion": 7}
        self.commit(
            [{"protocol": {**versions, "readerFeatures": features, "writerFeatures": features}}, self._schema()]
        )

    def _field(self, name: str, kind: Any) -> dict[str, Any]:
        self._num_fields += 1
        told = {}
        if self.mode != "none":
            told = {
                "delta.columnMapping.id": self._num_fields,
                "delta.columnMapping.physicalName": f"col-{self._num_fields}",
            }
        return {"name": name, "type": kind, "nullable": True, "metadata": told}

    def _add_field(self, name: str, kind: Any) -> None:
        self.fields.append(self._field(name, kind))

    def _schema(self) -> dict[str, Any]:
        settings = {"delta.enableDeletionVectors": "true"}
        if self.mode != "none":
            settings |= {
                "delta.columnMapping.mode": self.mode,
                "delta.columnMapping.maxColumnId": str(self._num_fields),
            }
        told = {
            "id": "1",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps({"type": "struct", "fields": self.fields}),
            "partitionColumns": ["part"] if self.is_partitioned else [],
            "configuration": settings,
        }
        return {"metaData": told}

    def commit(self, actions: list[Any]) -> None:
        """Write a commit."""
        path = self.folder / "_delta_log" / f"{self.version:020}.json"
        path.write_text("\n".join(map(json.dumps, actions)))
        self.version += 1

    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows that the table must have, by their value of "id"."""
        found = [
            self._seen(row)
            for file in self.files.values()
            for number, row in enumerate(file["rows"])
            if number not in file["deleted"]
        ]
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: row for row in found}

    def _seen(self, row: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for field in self.fields:
            value = row.get(key(field))
            if not isinstance(field["type"], str) and value is not None:
                value = {inner["name"]: value.get(key(inner)) for inner in field["type"]["fields"]}
            found[field["name"]] = value
        return found

    def _new_row(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for field in self.fields:
            kind = field["type"]
            if field["name"] == "id":
                found[key(field)] = self._next_id
                self._next_id += 1
            elif field["name"] == "part":
                found[key(field)] = self.random.choice(["a b", "c/d", None])
            elif isinstance(kind, str):
                found[key(field)] = self._value(kind)
            else:
                found[key(field)] = {key(inner): self._value(inner["type"]) for inner in kind["fields"]}
        return found

    def _value(self, kind: str) -> Any:
        if self.random.random() < 0.1:
            return None
        number = self.random.randrange(-1000, 1000)
        return {"long": number, "integer": number, "double": number / 8, "string": f"t{number}"}[kind]

    def _written(self, rows: list[dict[str, Any]]) -> list[Any]:
        """Write rows to new files, and return their actions."""
        part = next(field for field in self.fields if field["name"] == "part")
        groups: dict[Any, list[Any]] = {}
        for row in rows:
            groups.setdefault(row[key(part)] if self.is_partitioned else 0, []).append(row)
        actions = []
        for value, mine in groups.items():
            name = f"part-{len(self.files)}-{self.version}-{self.random.randrange(10**9)}.parquet"
            fields = [field for field in self.fields if not self.is_partitioned or field["name"] != "part"]
            schema = pa.schema([self._arrow_field(field) for field in fields])
            table = pa.Table.from_pylist([self._stored(row, fields) for row in mine], schema)
            pq.write_table(table, self.folder / name, row_group_size=self.random.choice([3, 7, 100]))
            values = {key(part): value} if self.is_partitioned else {}
            add = {
                "path": name,
                "partitionValues": values,
                "size": (self.folder / name).stat().st_size,
                "modificationTime": 0,
                "dataChange": True,
                "stats": json.dumps({"numRecords": len(mine)}),
            }
            self.files[name] = {"rows": mine, "deleted": set(), "add": add}
            actions.append({"add": add})
        return actions

    def _stored(self, row: dict[str, Any], fields: list[Any]) -> dict[str, Any]:
        """Return a row, or a struct, with the names of the files."""
        found = {}
        for field in fields:
            value = row.get(key(field))
            if not isinstance(field["type"], str) and value is not None:
                value = self._stored(value, field["type"]["fields"])
            found[self._file_name(field)] = value
        return found

    def _file_name(self, field: dict[str, Any]) -> str:
        # With ids, names in the files mean nothing.
        return f"any{1000 - field['metadata']['delta.columnMapping.id']}" if self.mode == "id" else key(field)

    def _arrow_field(self, field: dict[str, Any]) -> Any:
        kind, told = field["type"], None
        if self.mode == "id":
            told = {"PARQUET:field_id": str(field["metadata"]["delta.columnMapping.id"])}
        inner = KINDS[kind] if isinstance(kind, str) else pa.struct(list(map(self._arrow_field, kind["fields"])))
        return pa.field(self._file_name(field), inner, metadata=told)

    def _removed(self, chosen: list[int]) -> list[Any]:
        """Delete rows by deletion vectors, or by rewriting their files, and return the actions."""
        actions: list[Any] = []
        name_of_id = next(key(field) for field in self.fields if field["name"] == "id")
        for path, file in list(self.files.items()):
            gone = {n for n, row in enumerate(file["rows"]) if row[name_of_id] in chosen} - file["deleted"]
            if not gone:
                continue
            add = file["add"]
            same = {name: add[name] for name in ("path", "partitionValues", "size")}
            vector = {"deletionVector": add["deletionVector"]} if "deletionVector" in add else {}
            remove = {**same, **vector, "deletionTimestamp": 0, "dataChange": True, "extendedFileMetadata": True}
            actions.append({"remove": remove})
            file["deleted"] |= gone
            left = [row for number, row in enumerate(file["rows"]) if number not in file["deleted"]]
            if not left or self.random.random() < 0.2:  # as Spark does without deletion vectors
                del self.files[path]
                actions += self._written(left)
                continue
            kind = self.random.choice("iu")
            prefix = self.random.choice(["", "ab"]) if kind == "u" else ""
            told = deletion_vectors.written(self.folder, file["deleted"], kind, prefix)
            file["add"] = {**add, "deletionVector": told}
            actions.append({"add": file["add"]})
        return actions

    def insert(self) -> None:
        """Append rows."""
        self.commit(self._written([self._new_row() for _ in range(self.random.randrange(1, 40))]))

    def delete(self) -> None:
        """Delete some rows."""
        ids = list(self.rows())
        self.commit(self._removed(self.random.sample(ids, min(len(ids), self.random.randrange(1, 12)))))

    def update(self) -> None:
        """Replace some rows; "id" is new, so that a row that is read twice or not at all is seen."""
        chosen = self.random.sample(list(self.rows()), min(len(self.rows()), 5))
        self.commit(self._removed(chosen) + self._written([self._new_row() for _ in chosen]))

    def merge(self) -> None:
        """Replace some rows and insert others."""
        chosen = self.random.sample(list(self.rows()), min(len(self.rows()), 4))
        self.commit(self._removed(chosen) + self._written([self._new_row() for _ in range(len(chosen) + 3)]))

    def rename(self) -> None:
        """Rename a column and a field of the struct."""
        column = self.random.choice(
            [field for field in self.fields if field["name"] not in ("id", "part", "s")] or [{}]
        )
        column["name"] = f"renamed{self.version}"
        struct = next(field for field in self.fields if field["name"] == "s")
        self.random.choice(struct["type"]["fields"])["name"] = f"inner{self.version}"
        self.commit([self._schema()])

    def drop(self) -> None:
        """Drop a column; a later one of the same name is another column."""
        others = [field for field in self.fields if field["name"] not in ("id", "part", "s")]
        if len(others) > 1:
            self.fields.remove(self.random.choice(others))
            self.commit([self._schema()])

    def add(self) -> None:
        """Add a column, and a field of the struct."""
        names = {field["name"] for field in self.fields}
        name = next(name for name in ("x", "text", f"added{self.version}") if name not in names)
        self._add_field(name, self.random.choice(list(KINDS)))
        struct = next(field for field in self.fields if field["name"] == "s")
        struct["type"]["fields"].append(self._field(f"new{self.version}", "long"))
        self.commit([self._schema()])

    def checkpoint(self) -> None:
        """Write a checkpoint."""
        from deltalake import DeltaTable

        DeltaTable(str(self.folder)).create_checkpoint()

    def run(self, num_commits: int) -> None:
        """Insert rows, and make random commits after that."""
        self.insert()
        changes = [self.insert, self.delete, self.delete, self.update, self.merge, self.checkpoint]
        if self.mode != "none":
            changes += [self.rename, self.drop, self.add]
        for _ in range(num_commits):
            self.random.choice(changes)()
        self.insert()


def key(field: dict[str, Any]) -> str:
    """The name of a column in the files."""
    return str(field["metadata"].get("delta.columnMapping.physicalName", field["name"]))
