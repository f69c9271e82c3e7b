"""``lagom.extensions.data.sources.delta``: of a Delta table the current rows, by its log, or none at all."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError, LagomError
from tests.extensions.data.delta_history import History

WRITTEN = Path(__file__).parent / "delta_1_6"
IDS = [0, 2, 4, 16, 18, 19, 20, 22, 24, 26, 28, 29]
"""Values that deltalake reads from the table."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A copy of a table that deltalake wrote."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "table"))


def commit(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020}.json"


def append(table: Path, action: dict[str, Any]) -> None:
    with commit(table, 4).open("a") as file:
        file.write("\n" + json.dumps(action))


def change_add(table: Path, **changes: Any) -> None:
    """Change the first file that version 3 adds."""
    lines = [json.loads(line) for line in commit(table, 3).read_text().splitlines()]
    next(line["add"] for line in lines if "add" in line).update(changes)
    commit(table, 3).write_text("\n".join(map(json.dumps, lines)))


def ids(folder: Any, **options: Any) -> list[int]:
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


@pytest.mark.parametrize("has_hint", [True, False])
def test_a_table_in_any_file_system_is_read(table: Path, has_hint: bool) -> None:
    """lagom copies the log to a local folder, from the last checkpoint on if the table names it."""
    if not has_hint:
        (table / "_delta_log" / "_last_checkpoint").unlink()
    memory = MemoryFileSystem()
    memory.put(str(table), "/delta", recursive=True)
    if has_hint:
        memory.rm(f"/delta/_delta_log/{0:020}.json")
    try:
        assert ids("/delta", filesystem=memory) == ids(table) == IDS
    finally:
        memory.rm("/delta", recursive=True)


@pytest.mark.parametrize("mode", ["none", "name"])
def test_deletion_vectors_in_any_file_system_are_read(tmp_path: Path, mode: str) -> None:
    history = History(tmp_path / "table", 11, mode)
    history.insert()
    history.delete()
    history.checkpoint()
    for _ in range(3):
        history.insert()
        history.delete()
    assert list(history.folder.glob("**/deletion_vector_*.bin"))
    memory = MemoryFileSystem()
    memory.put(str(history.folder), "/delta", recursive=True)
    try:
        assert ids("/delta", filesystem=memory) == ids(history.folder) == sorted(history.rows())
        for file in memory.glob("/delta/**/deletion_vector_*.bin"):
            memory.rm(file)
        with pytest.raises(DataError, match=r"a deletion vector that cannot be read: .*pass Spark's DataFrame"):
            ids("/delta", filesystem=memory)
    finally:
        memory.rm("/delta", recursive=True)


def test_a_data_set_with_deleted_rows_travels_and_has_a_state_of_its_own(tmp_path: Path) -> None:
    history = History(tmp_path / "table", 5, "name")
    history.insert()
    before = ParquetLoader(ParquetDataset(history.folder, columns=["id"]), 3)
    history.delete()
    dataset = pickle.loads(pickle.dumps(ParquetDataset(history.folder, columns=["id"])))
    (found,) = ParquetLoader(dataset, 99)
    assert sorted(found["id"].tolist()) == sorted(history.rows())
    assert [dataset[row]["id"].item() for row in range(len(dataset))] == found["id"].tolist()
    with pytest.raises(ValueError, match="the state is of another data set"):
        ParquetLoader(dataset, 3).load_state_dict(before.state_dict())


def test_columns_whose_type_was_widened_have_the_type_of_the_log(tmp_path: Path) -> None:
    """Delta widens a type in the log, and leaves the files as they are."""
    folder = added_later(tmp_path / "table")
    pq.write_table(pa.table({"a": pa.array([1, 2, 3], pa.float32())}), folder / "1.parquet")
    pq.write_table(pa.table({"a": [4.0], "b": pa.array([8], pa.int32()), "c": [[5.0, 6.0]]}), folder / "2.parquet")
    log = folder / "_delta_log" / f"{0:020}.json"
    names = ["typeWidening"]
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    actions[0] = {"protocol": {**versions, "readerFeatures": names, "writerFeatures": names}}
    for action in actions[2:]:
        action["add"]["size"] = (folder / action["add"]["path"]).stat().st_size
    log.write_text("\n".join(map(json.dumps, actions)))
    (found,) = ParquetLoader(ParquetDataset(folder, columns=["a", "b"], nulls=0), 99)
    assert (found["a"].dtype, found["b"].dtype) == (torch.float64, torch.int64)
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, 2, 3, 4], [0, 0, 0, 8])


def test_texts_that_a_delete_has_rewritten_are_read_beside_others(tmp_path: Path) -> None:
    from deltalake import DeltaTable, write_deltalake

    folder = str(tmp_path / "table")
    write_deltalake(folder, pa.table({"id": range(4), "text": list("abcd"), "list": [[str(n)] for n in range(4)]}))
    DeltaTable(folder).delete("id < 2")  # deltalake writes what is left as string_view
    write_deltalake(folder, pa.table({"id": [9], "text": ["new"], "list": [["9"]]}), mode="append")
    (found,) = ParquetLoader(ParquetDataset(folder, columns=["id", "text"]), 99)
    assert sorted(zip(found["id"].tolist(), found["text"], strict=True)) == [(2, "c"), (3, "d"), (9, "new")]
    assert ids(folder, filters=[("text", "in", ["d", "new"])]) == [3, 9]


def test_a_log_that_lacks_a_commit_is_an_error_not_another_version(table: Path) -> None:
    commit(table, 3).unlink()
    with pytest.raises(DataError, match=r"the Delta table .*table has a log that deltalake cannot read: .* 2 .* 4"):
        ids(table)


def test_without_deltalake_the_error_names_it_and_a_data_set_made_before_needs_none(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pickle.dumps(ParquetDataset(table, columns=["id"]))
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(LagomError, match=r"pip install 'lagom-spark\[delta\]'.*train_set="):
        ids(table)
    (found,) = ParquetLoader(pickle.loads(made), 99)
    assert sorted(found["id"].tolist()) == IDS


def test_a_file_that_the_log_names_and_nobody_has_is_an_error(table: Path) -> None:
    name = str(ParquetDataset(table, columns=["id"]).table.files[0].path)
    Path(name).unlink()
    with pytest.raises(DataError, match=r"part-.*parquet is gone"):
        ids(table)


def deletion_vector(table: Path) -> None:
    names = ["deletionVectors"]
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    append(table, {"protocol": {**versions, "readerFeatures": names, "writerFeatures": names}})
    assert ids(table) == IDS  # a table that may have such files, and has none
    where = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40}
    change_add(table, deletionVector={**where, "cardinality": 1})


def elsewhere(table: Path) -> None:
    change_add(table, path="s3://other/part.parquet")


def version(table: Path) -> None:
    append(table, {"protocol": {"minReaderVersion": 4, "minWriterVersion": 8}})


def feature(table: Path) -> None:
    names = ["deletionVectors", "variantShredding-preview"]
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    append(table, {"protocol": {**versions, "readerFeatures": names, "writerFeatures": names}})


def damaged(table: Path) -> None:
    commit(table, 4).write_text('{"add": ')


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (deletion_vector, r"has a deletion vector that cannot be read: .*pass Spark's DataFrame"),
        (elsewhere, "outside of its folder"),
        (version, "deltalake cannot read: .*version 4.*; if Spark can read it, pass Spark's DataFrame"),
        (feature, r"asks for the features \['variantShredding-preview'\].*pass Spark's DataFrame"),
        (damaged, "a log that deltalake cannot read"),
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
    told = {"id": "1", "schemaString": schema, "partitionColumns": [], "configuration": {}}
    actions: list[Any] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": {**told, "format": {"provider": "parquet", "options": {}}}},
    ]
    for name in ("1.parquet", "2.parquet"):
        size = (folder / name).stat().st_size
        add: dict[str, Any] = {
            "path": name,
            "size": size,
            "partitionValues": {},
            "modificationTime": 0,
            "dataChange": True,
        }
        actions.append({"add": add})
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
