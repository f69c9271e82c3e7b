"""``lagom.data.sources.delta``: of a Delta table the current rows, by its log, or none at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError

WRITTEN = Path(__file__).parent / "delta_1_6"
IDS = [0, 2, 4, 16, 18, 19, 20, 22, 24, 26, 28, 29]
"""What deltalake reads of it."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A copy of a table that deltalake wrote."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "table"))


def commit(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020}.json"


def checkpoint(table: Path) -> Path:
    return table / "_delta_log" / f"{2:020}.checkpoint.parquet"


def changed(path: Path, kind: str, change: Callable[[Any], Any]) -> None:
    """Change the first action of that kind in a commit."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(line[kind] for line in lines if kind in line))
    path.write_text("\n".join(map(json.dumps, lines)))


def ids(folder: Path, **options: Any) -> list[int]:
    (found,) = ParquetLoader(ParquetDataset(folder, columns=["id"], **options), 99)
    return sorted(found["id"].tolist())


def test_the_current_rows_come_with_the_types_of_the_schema(table: Path) -> None:
    dataset = ParquetDataset(table, nulls={"kind": "mask"})
    assert dataset.columns == ["id", "x", "kind", "number"]
    (found,) = ParquetLoader(dataset, 99)
    rows = zip(*(found[n] for n in ("id", "x", "kind", "kind__valid", "number")), strict=True)
    for one, x, kind, valid, number in sorted(rows):
        assert x == one / 4
        assert valid == (one % 5 != 4)
        assert not valid or kind == f"k {one % 2}"
        assert number == str(int(one) % 2)  # text, as its type is, though all are integers
    assert sorted(found["id"].tolist()) == IDS
    assert ids(table, filters=[("number", "=", "1")]) == [19, 29]


def test_the_log_may_begin_with_a_checkpoint_and_have_none(table: Path) -> None:
    (table / "_delta_log" / "_last_checkpoint").unlink()
    for version in (0, 1):
        commit(table, version).unlink()
    assert ids(table) == IDS
    shutil.rmtree(table)
    shutil.copytree(WRITTEN, table)
    checkpoint(table).unlink()
    assert ids(table) == IDS


def test_a_checkpoint_in_parts_counts_when_all_are_there(table: Path) -> None:
    whole = pq.read_table(checkpoint(table))
    names = [table / "_delta_log" / f"{2:020}.checkpoint.{part:010}.{2:010}.parquet" for part in (1, 2)]
    pq.write_table(whole.slice(0, 3), names[0])
    pq.write_table(whole.slice(3), names[1])
    checkpoint(table).unlink()
    commit(table, 0).unlink()
    assert ids(table) == IDS
    names[1].unlink()
    with pytest.raises(DataError, match="lacks version 0"):
        ids(table)


def test_a_log_that_lacks_a_commit_is_an_error_not_another_version(table: Path) -> None:
    commit(table, 3).unlink()
    with pytest.raises(DataError, match=r"the Delta table .*table lacks version 3 in its log"):
        ids(table)
    shutil.rmtree(table / "_delta_log")
    (table / "_delta_log").mkdir()
    with pytest.raises(DataError, match="has no commits"):
        ids(table)


def test_a_file_that_the_log_names_and_nobody_has_is_an_error(table: Path) -> None:
    name = str(ParquetDataset(table, columns=["id"]).table.files[0].path)
    Path(name).unlink()
    with pytest.raises(DataError, match=r"part-.*parquet is gone"):
        ids(table)


def deletion_vector(table: Path) -> None:
    changed(commit(table, 3), "add", lambda add: add.update(deletionVector={"storageType": "u", "cardinality": 1}))


def elsewhere(table: Path) -> None:
    changed(commit(table, 3), "add", lambda add: add.update(path="s3://other/part.parquet"))


def version(table: Path) -> None:
    with commit(table, 4).open("a") as file:
        file.write("\n" + json.dumps({"protocol": {"minReaderVersion": 4, "minWriterVersion": 8}}))


def feature(table: Path) -> None:
    with commit(table, 4).open("a") as file:
        told = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors", "typeWidening"]}
        file.write("\n" + json.dumps({"protocol": told}))


def mapping(table: Path) -> None:
    checkpoint(table).unlink()
    mode = {"delta.columnMapping.mode": "name"}
    changed(commit(table, 0), "metaData", lambda data: data.update(configuration=mode))


def sidecar(table: Path) -> None:
    whole = pq.read_table(checkpoint(table)).to_pylist()
    kind = pa.schema([("sidecar", pa.struct([("path", pa.string())]))])
    pq.write_table(pa.Table.from_pylist([{"sidecar": {"path": "x"}} for _ in whole], kind), checkpoint(table))


def damaged(table: Path) -> None:
    commit(table, 4).write_text('{"add": ')


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (deletion_vector, r"has deletion vectors .*REORG"),
        (elsewhere, "outside of its folder"),
        (version, "asks for readers of version 4"),
        (feature, r"asks for the features \['typeWidening'\]"),
        (mapping, "column mapping by name"),
        (sidecar, "checkpoint in several files"),
        (damaged, "a log that cannot be read"),
    ],
)
def test_what_the_log_says_and_lagom_does_not_know_is_refused_by_name(
    table: Path, change: Callable[[Path], None], told: str
) -> None:
    change(table)
    with pytest.raises(DataError, match=f"the Delta table .*table .*{told}"):
        ids(table)


def test_a_folder_in_a_table_is_no_table(table: Path) -> None:
    with pytest.raises(DataError, match=r"is a part of the Delta table .*filters="):
        ids(table / "kind=k%200" / "number=0")
    with pytest.raises(ValueError, match="one at a time"):
        ParquetDataset([table, table])


def added_later(folder: Path) -> Path:
    """A table with two files, the second of which has columns that the first is older than."""
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    pq.write_table(pa.table({"a": [1.0, 2.0, 3.0]}), folder / "1.parquet", row_group_size=2)
    pq.write_table(pa.table({"a": [4.0], "b": [8], "c": [[5.0, 6.0]]}), folder / "2.parquet")
    kinds = {"a": "double", "b": "long", "c": {"type": "array", "elementType": "double", "containsNull": True}}
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()]
    schema = json.dumps({"type": "struct", "fields": fields})
    actions: list[Any] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": {"id": "1", "schemaString": schema, "partitionColumns": [], "configuration": {}}},
    ]
    for name in ("1.parquet", "2.parquet"):
        size = (folder / name).stat().st_size
        actions.append({"add": {"path": name, "size": size, "partitionValues": {}, "dataChange": True}})
    (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    return folder


def test_a_column_that_was_added_later_is_null_in_older_files(tmp_path: Path) -> None:
    folder = added_later(tmp_path / "table")
    dataset = ParquetDataset(folder, nulls={"b": "mask", "c": 0})
    assert dataset.columns == ["a", "b", "c"]
    (found,) = ParquetLoader(dataset, 99)
    assert found["a"].tolist() == [1, 2, 3, 4]
    assert (found["b"].tolist(), found["b__valid"].tolist()) == ([0, 0, 0, 8], [False, False, False, True])
    assert found["c"].tolist() == [[0, 0]] * 3 + [[5, 6]]
    (alone,) = ParquetLoader(ParquetDataset(folder, columns=["b"], nulls=-1), 99)
    assert alone["b"].tolist() == [-1, -1, -1, 8]
    for filters, wanted in (([("b", ">", 7)], [4]), ([("a", ">", 1)], [2, 3, 4])):
        (some,) = ParquetLoader(ParquetDataset(folder, columns=["a", "b"], nulls=0, filters=filters), 99)
        assert some["a"].tolist() == wanted
    with pytest.raises(DataError, match=r"1.parquet, row group 0, column 'b', row 0: a null"):
        list(ParquetLoader(ParquetDataset(folder, columns=["b"]), 99))
