"""``MappedColumns``: finds the columns of Delta tables with column mapping, and of Iceberg tables, in their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lagom.errors import DataError

_FIELD_ID = b"PARQUET:field_id"
_REMEDY = "as files of Hive and others that were added to the table; pass train_set=spark.read.table(...) in its place"
_ID, _NAME = "delta.columnMapping.id", "delta.columnMapping.physicalName"


@dataclass(frozen=True)
class MappedColumns:
    """The columns of a table by their names in the table, with their names and ids in its files.

    A column may be renamed, dropped, and added again without a change of the files. See "Column Mapping" in the
    protocol of Delta.
    """

    fields: Mapping[str, Mapping[str, Any]]
    """Each column as the log describes it, which includes the fields of structs."""
    types: Mapping[str, Any]
    """Arrow's type of each column, with the names of the table."""
    by_id: bool
    """Whether files have ids, by which columns are found; otherwise columns are found by name."""
    needed: frozenset[str] | None = None
    """Columns of an Iceberg table that no file may lack, as each must have ids; None for a Delta table."""

    def stored(self, schema: Any) -> dict[str, str]:
        """Return for each column that a file has its name in the file; ``schema`` is Arrow's schema of the file.

        Raises:
            DataError: if the file of an Iceberg table has no ids, or lacks a column that is ``needed``.
        """
        self._check(schema)
        places = {name: self._place(field, list(schema)) for name, field in self.fields.items()}
        return {name: schema.field(place).name for name, place in places.items() if place is not None}

    def _check(self, schema: Any) -> None:
        if self.needed is None:
            return
        if not any((column.metadata or {}).get(_FIELD_ID) for column in schema):
            raise DataError(
                f"a file of the Iceberg table has columns without ids ({', '.join(schema.names)}); {_REMEDY}"
            )
        lacking = [name for name in sorted(self.needed) if self._place(self.fields[name], list(schema)) is None]
        if lacking:
            raise DataError(
                f"a file of the Iceberg table has no column {lacking[0]}, by which it is partitioned; {_REMEDY}"
            )

    def schema(self, schema: Any) -> Any:
        """Return Arrow's schema of a file with the names of the table, without columns that the table lacks."""
        import pyarrow as pa

        found = []
        for name, stored in self.stored(schema).items():
            kind = schema.field(stored).type
            found.append(pa.field(name, self.renamed(name, pa.nulls(0, kind)).type))
        return pa.schema(found)

    def renamed(self, name: str, array: Any) -> Any:
        """Return values of column ``name`` with the table's names for the fields of structs."""
        return self._renamed(array, self.fields[name]["type"], self.types[name])

    def _renamed(self, array: Any, kind: Any, wanted: Any) -> Any:
        import pyarrow as pa

        if not _has_struct(kind):
            return array
        if kind["type"] == "struct":
            return self._struct(array, kind, wanted)
        missing = array.is_null() if array.null_count else None
        if pa.types.is_map(array.type):  # Arrow tells no lengths of maps
            pair = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
            array = array.cast(pa.list_(pair))
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        starts = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        items = array.flatten()
        if kind["type"] == "array":
            items = self._renamed(items, kind["elementType"], wanted.value_type)
            return pa.ListArray.from_arrays(starts, items, mask=missing)
        keys = self._renamed(items.field(0), kind["keyType"], wanted.key_type)
        items = self._renamed(items.field(1), kind["valueType"], wanted.item_type)
        return pa.MapArray.from_arrays(starts, keys, items, mask=missing)

    def _struct(self, array: Any, kind: Any, wanted: Any) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        parts = []
        for field in kind["fields"]:
            inner = wanted.field(field["name"]).type
            place = self._place(field, list(array.type))
            if place is None:  # added to the table after the file was written
                parts.append(pa.nulls(len(array), inner))
            else:
                parts.append(self._renamed(pc.struct_field(array, [place]), field["type"], inner))
        names = [field["name"] for field in kind["fields"]]
        fields = [pa.field(name, part.type) for name, part in zip(names, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null() if array.null_count else None)

    def _place(self, field: Mapping[str, Any], stored: Sequence[Any]) -> int | None:
        """Return the index of a column or a struct's field among Arrow's fields ``stored``; None if it is not there."""
        told = field.get("metadata") or {}
        ids = [(one.metadata or {}).get(_FIELD_ID) for one in stored]
        if self.by_id and any(ids):
            keys, key = ids, str(told.get(_ID)).encode()
        else:
            keys, key = [one.name for one in stored], told.get(_NAME, field["name"])
        return keys.index(key) if key in keys else None


def described_by_id(struct: Any) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """Return ``fields`` and ``types`` of a ``MappedColumns`` for pyiceberg's ``StructType``, where all have ids."""
    described, types = _described(struct)
    return {field["name"]: field for field in described["fields"]}, {one.name: one.type for one in types}


def _described(kind: Any) -> tuple[Any, Any]:
    """Return a type of pyiceberg as Delta's log describes types, and as Arrow's type."""
    import pyarrow as pa
    from pyiceberg import types as t
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    if isinstance(kind, t.StructType):
        inner = [(field, *_described(field.field_type)) for field in kind.fields]
        fields = [{"name": field.name, "type": json, "metadata": {_ID: field.field_id}} for field, json, _ in inner]
        return {"type": "struct", "fields": fields}, pa.struct([(field.name, arrow) for field, _, arrow in inner])
    if isinstance(kind, t.ListType):
        json, arrow = _described(kind.element_type)
        return {"type": "array", "elementType": json}, pa.list_(arrow)
    if isinstance(kind, t.MapType):
        (key, arrow_key), (value, arrow_value) = _described(kind.key_type), _described(kind.value_type)
        return {"type": "map", "keyType": key, "valueType": value}, pa.map_(arrow_key, arrow_value)
    short: dict[Any, Any] = {t.StringType: pa.string(), t.BinaryType: pa.binary(), t.UUIDType: pa.binary(16)}
    return str(kind), short.get(type(kind)) or schema_to_pyarrow(kind)


def _has_struct(kind: Any) -> bool:
    if isinstance(kind, str):
        return False
    return kind["type"] == "struct" or any(_has_struct(kind[key]) for key in _INNER if key in kind)


_INNER = ("elementType", "keyType", "valueType")
"""Keys of the types inside of lists and maps."""
