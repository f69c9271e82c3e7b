"""``deleted_rows``: reads which rows of a Delta table's files are deleted, by their deletion vectors."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_UUID_CHARS = 20
"""Characters of a file's identifier at the end of ``pathOrInlineDv``; a folder stands before."""


def deleted_rows(table: Any) -> dict[str, NDArray[np.int64]]:
    """Return the deleted rows, in order, of each file of the table that has some, by the file's path in the table.

    Args:
        table: a ``DeltaTable`` of deltalake.

    Raises:
        DeltaError: if deltalake cannot read a vector.
        ValueError: if deltalake names a file outside of the table.
    """
    import pyarrow as pa

    base = table.table_uri.rstrip("/") + "/"
    deleted = {}
    for batch in pa.table(table.deletion_vectors()).to_batches():
        for path, kept in zip(batch.column("filepath"), batch.column("selection_vector"), strict=True):
            if not path.as_py().startswith(base):
                raise ValueError(f"a deletion vector is of {path}, which is not in {base}")
            mask = kept.values.to_numpy(zero_copy_only=False)
            # Rows after the end of the mask are kept.
            deleted[unquote(path.as_py()[len(base) :])] = np.flatnonzero(~mask).astype(np.int64)
    return deleted


def copy_vectors(home: Any, folder: str, scratch: str) -> None:
    """Copy the files of deletion vectors that a copied log names next to it, so that deltalake finds them.

    Args:
        home: pyarrow's file system of the table.
        folder: the table.
        scratch: local folder with a copy of the log.
    """
    from pyarrow import fs

    local = fs.LocalFileSystem()
    for name in sorted(set(filter(None, map(_file, _vectors(Path(scratch, "_delta_log")))))):
        if home.get_file_info(f"{folder}/{name}").is_file:  # an older version's vector may be gone
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            fs.copy_files(f"{folder}/{name}", f"{scratch}/{name}", source_filesystem=home, destination_filesystem=local)


def _vectors(log: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the deletion vectors that commits and checkpoints name."""
    import pyarrow.parquet as pq

    for path in log.rglob("*"):
        if path.suffix == ".json":
            actions = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        elif path.suffix == ".parquet" and "add" in pq.read_schema(path).names:
            actions = pq.read_table(path, columns=["add"]).to_pylist()
        else:
            continue
        for action in actions:
            vector = ((action or {}).get("add") or {}).get("deletionVector")
            if vector is not None:
                yield vector


def _file(vector: Mapping[str, Any]) -> str | None:
    """Return the path in the table of the file with ``vector``; None if the vector is in the log, or elsewhere."""
    if vector["storageType"] != "u":
        return None
    prefix, digits = vector["pathOrInlineDv"][:-_UUID_CHARS], vector["pathOrInlineDv"][-_UUID_CHARS:]
    words = []
    for start in range(0, len(digits), 5):
        word = 0
        for digit in digits[start : start + 5]:
            word = 85 * word + _DIGITS.index(digit)
        words.append(word)
    name = f"deletion_vector_{uuid.UUID(bytes=struct.pack('>4I', *words))}.bin"
    return f"{prefix}/{name}" if prefix else name
