"""``MappedColumns``: finds the columns of a Delta table with column mapping, whose files have other names for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    def stored(self, schema: Any) -> dict[str, str]:
        """Return for each column that a file has its name in the file; ``schema`` is Arrow's schema of the file."""
        places = {name: self._place(field, list(schema)) for name, field in self.fields.items()}
        return {name: schema.field(place).name for name, place in places.items() if place is not None}

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
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        starts = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        valid = array.is_null() if array.null_count else None
        items = array.flatten()
        if kind["type"] == "array":
            items = self._renamed(items, kind["elementType"], wanted.value_type)
            return pa.ListArray.from_arrays(starts, items, mask=valid)
        keys = self._renamed(items.field(0), kind["keyType"], wanted.key_type)
        items = self._renamed(items.field(1), kind["valueType"], wanted.item_type)
        return pa.MapArray.from_arrays(starts, keys, items, mask=valid)

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
        ids = [(one.metadata or {}).get(b"PARQUET:field_id") for one in stored]
        if self.by_id and any(ids):
            keys, key = ids, str(told.get(_ID)).encode()
        else:
            keys, key = [one.name for one in stored], told.get(_NAME, field["name"])
        return keys.index(key) if key in keys else None


def _has_struct(kind: Any) -> bool:
    if isinstance(kind, str):
        return False
    return kind["type"] == "struct" or any(_has_struct(kind[key]) for key in _INNER if key in kind)


_INNER = ("elementType", "keyType", "valueType")
"""Keys of the types inside of lists and maps."""
