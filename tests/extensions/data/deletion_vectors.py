"""Writes deletion vectors by the protocol of Delta, as Spark does; deltalake reads them, but writes none.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md#deletion-vector-format
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Any

_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(data: bytes) -> str:
    """The text of ``data``, whose length is a multiple of 4."""
    found = []
    for (word,) in struct.iter_unpack(">I", data):
        found += [_Z85[word // 85**place % 85] for place in (4, 3, 2, 1, 0)]
    return bytes(found).decode()


def bitmap(rows: Collection[int]) -> bytes:
    """Rows as a Roaring bitmap of 64 bits in the portable format, with Delta's magic number in front."""
    parts = [(key, list(group)) for key, group in groupby(sorted(rows), lambda row: row >> 32)]
    found = struct.pack("<IQ", 1681511377, len(parts))
    return found + b"".join(struct.pack("<I", key) + _bitmap_32(part) for key, part in parts)


def _bitmap_32(rows: list[int]) -> bytes:
    groups = [(key & 0xFFFF, [row & 0xFFFF for row in group]) for key, group in groupby(rows, lambda row: row >> 16)]
    head = struct.pack("<II", 12346, len(groups))
    head += b"".join(struct.pack("<HH", key, len(group) - 1) for key, group in groups)
    bodies = [_container(group) for _, group in groups]
    start = len(head) + 4 * len(groups)
    offsets = [start + sum(map(len, bodies[:number])) for number in range(len(bodies))]
    return head + struct.pack(f"<{len(offsets)}I", *offsets) + b"".join(bodies)


def _container(rows: list[int]) -> bytes:
    if len(rows) <= 4096:
        return struct.pack(f"<{len(rows)}H", *rows)
    bits = bytearray(8192)
    for row in rows:
        bits[row >> 3] |= 1 << (row & 7)
    return bytes(bits)


def written(table: Path, rows: Collection[int], kind: str = "u", prefix: str = "") -> dict[str, Any]:
    """Write the vector of deleted ``rows``, and return what the log says of it.

    Args:
        kind: "i" in the log, "u" in a file of the table, "p" in a file with an absolute path.
        prefix: a folder in the table for the file.
    """
    data = bitmap(rows)
    told = {"storageType": kind, "sizeInBytes": len(data), "cardinality": len(rows)}
    if kind == "i":
        return {**told, "pathOrInlineDv": z85(data + b"\0" * (-len(data) % 4))}
    name = uuid.uuid4()
    file = table / prefix / f"deletion_vector_{name}.bin"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"\1" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    where = file.as_uri() if kind == "p" else prefix + z85(name.bytes)
    return {**told, "pathOrInlineDv": where, "offset": 1}


def delete(table: Path, deleted: dict[str, tuple[Collection[int], str]]) -> None:
    """Commit deletion vectors: for each path in the log all deleted rows of its file, and the kind of the vector."""
    log = sorted((table / "_delta_log").glob("*.json"))
    adds: dict[str, Any] = {}
    for commit in log:
        for line in commit.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                adds[action["add"]["path"]] = action["add"]
            if "remove" in action:
                adds.pop(action["remove"]["path"], None)
    actions: list[Any] = [{"commitInfo": {"operation": "DELETE", "timestamp": 0, "operationParameters": {}}}]
    for path, (rows, kind) in deleted.items():
        add = adds[path]
        vector = {} if add.get("deletionVector") is None else {"deletionVector": add["deletionVector"]}
        same = {name: add[name] for name in ("path", "partitionValues", "size")}
        remove = {**same, **vector, "deletionTimestamp": 0, "dataChange": True, "extendedFileMetadata": True}
        actions += [{"remove": remove}, {"add": {**add, "deletionVector": written(table, rows, kind)}}]
    (table / "_delta_log" / f"{len(log):020}.json").write_text("\n".join(map(json.dumps, actions)))
