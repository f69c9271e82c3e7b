"""``data.sources.spark_stream_log``: of a folder that Spark's streaming wrote, the files that its log names."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError


def test_files_that_were_never_committed_are_not_read(tmp_path: Path) -> None:
    table = wrote(tmp_path / "a table", ["p=a%251/f0", "p=a%251/f1", "p=b/f2", "p=b/f3", "p=b/left-over"])
    log(table, "0", ["p=a%251/f0"])
    assert rows(table) == [(0, "a%1")]
    log(table, "1", ["p=a%251/f1"])
    log(table, "2.compact", ["p=a%251/f0", "p=a%251/f1", "p=b/f2"])
    (table / "_spark_metadata" / "0").unlink()
    log(table, "3", ["p=b/f3"])
    (table / "_spark_metadata" / ".3.crc").write_bytes(b"crc")
    assert rows(table) == [(0, "a%1"), (1, "a%1"), (2, "b"), (3, "b")]
    assert rows(table.rename(tmp_path / "moved")) == [(0, "a%1"), (1, "a%1"), (2, "b"), (3, "b")]


def test_a_log_that_does_not_tell_is_an_error(tmp_path: Path) -> None:
    table = wrote(tmp_path / "table", ["f0", "f1"])
    (table / "_spark_metadata").mkdir()
    with pytest.raises(DataError, match=r"Spark's streaming.*there are \[\]"):
        ParquetDataset(table)
    log(table, "0", ["f0"])
    log(table, "2", ["f1"])
    with pytest.raises(DataError, match=r"there are \[0, 2\]"):
        ParquetDataset(table)
    log(table, "1", ["gone"])
    with pytest.raises(DataError, match=r"lacks the file .*gone\.parquet"):
        ParquetDataset(table)
    (table / "_spark_metadata" / "1").write_text("v2\n")
    with pytest.raises(DataError, match=r"cannot be read: .*'v2'"):
        ParquetDataset(table)


def wrote(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [number]}), path)
    return folder


def log(folder: Path, batch: str, names: list[str]) -> None:
    (folder / "_spark_metadata").mkdir(exist_ok=True)
    lines = [{"path": (folder / f"{name}.parquet").as_uri(), "size": 1, "action": "add"} for name in names]
    (folder / "_spark_metadata" / batch).write_text("\n".join(["v1", *map(json.dumps, lines)]))


def rows(folder: Path) -> list[tuple[int, str]]:
    (batch,) = ParquetLoader(ParquetDataset(folder), 99)
    return sorted(zip(batch["id"].tolist(), batch["p"], strict=True))
