"""``lagom.extensions.data.sources.iceberg``: of an Iceberg table the rows of one version, by its metadata, or none."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable
from pyiceberg.utils.concurrent import ExecutorFactory

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError, LagomError
from tests.extensions.data.iceberg_history import IcebergHistory
from tests.extensions.data.table_checks import check


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """End the threads that pyiceberg keeps for later tables."""
    yield
    ExecutorFactory.get_or_create().shutdown()
    ExecutorFactory._instance = None


def ids(source: object) -> list[int]:
    (found,) = ParquetLoader(ParquetDataset(source, columns=["id"]), 999)  # type: ignore[arg-type]
    return sorted(found["id"].tolist())


def check_against_pyiceberg(history: IcebergHistory) -> None:
    """Compare the history's rows with those that pyiceberg reads, which shows that the table is written rightly."""
    table = StaticTable.from_metadata(history.folder.as_uri())
    assert isinstance(table.catalog, NoopCatalog)
    found = {row["id"]: row["part"] for row in table.scan().to_arrow().to_pylist()}
    assert found == {one: row["part"] for one, row in history.rows().items()}


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("deletes", ["none", "positions", "vectors"])
def test_a_random_history_leaves_the_rows_that_it_should(tmp_path: Path, deletes: str, is_partitioned: bool) -> None:
    history = IcebergHistory(tmp_path / "w", 3 + is_partitioned, is_partitioned=is_partitioned)
    history.run(12)
    if deletes != "none":
        history.mask(list(history.rows())[::3], by_vector=deletes == "vectors")
    check(history)
    check_against_pyiceberg(history)


@pytest.mark.soak  # the test above has six histories
@pytest.mark.parametrize("seed", range(100))
def test_random_histories_leave_the_rows_that_they_should(tmp_path: Path, seed: int) -> None:
    history = IcebergHistory(tmp_path / "w", seed, is_partitioned=seed % 2 == 1)
    history.run(4 + seed % 12)
    if seed % 3:
        history.mask(list(history.rows())[:: 2 + seed % 3], by_vector=seed % 3 == 2)
    if history.rows():
        check(history)
        check_against_pyiceberg(history)


def test_a_copied_table_and_an_older_version_are_read(tmp_path: Path) -> None:
    history = IcebergHistory(tmp_path / "w", 1)
    history.run(0)
    older, before = history.folder, sorted(history.rows())
    history.run(0)
    folder = Path(history.table.location().removeprefix("file://"))
    copy = Path(shutil.move(folder, tmp_path / "copy"))
    assert ids(copy / "metadata" / history.folder.name) == sorted(history.rows())
    assert ids(copy / "metadata" / older.name) == before
    shutil.move(copy, folder)
    assert ids(history.table.metadata_location) == sorted(history.rows())


def test_a_table_without_a_catalog_is_read_by_its_folder_and_another_is_refused(tmp_path: Path) -> None:
    history = IcebergHistory(tmp_path / "w", 2)
    history.run(0)
    folder = Path(history.table.location().removeprefix("file://"))
    with pytest.raises(DataError, match=r"a catalog, which knows the current metadata file: name this file"):
        ParquetDataset(folder)
    with pytest.raises(DataError, match="is a part of the Iceberg table"):
        ParquetDataset(folder / "data")
    hint = folder / "metadata" / "version-hint.text"
    hint.write_text("4")
    with pytest.raises(DataError, match="and metadata of a catalog"):
        ParquetDataset(folder)
    older, before = history.folder.read_bytes(), sorted(history.rows())
    history.run(0)
    newer = history.folder.read_bytes()
    for path in history.folder.parent.glob("*.metadata.json"):
        path.unlink()
    (folder / "metadata" / "v4.metadata.json").write_bytes(older)
    assert ids(folder) == before
    (folder / "metadata" / "v5.metadata.json").write_bytes(newer)  # before the hint, as writers do
    assert ids(folder) == sorted(history.rows()) != before
    hint.write_text("7")
    with pytest.raises(DataError, match=r"Iceberg table .* cannot read: .*v7.metadata.json"):
        ParquetDataset(folder)


def test_maps_of_structs_are_renamed(tmp_path: Path) -> None:
    catalog = SqlCatalog("test", uri="sqlite:///:memory:", warehouse=tmp_path.as_uri())
    catalog.create_namespace("n")
    kind = pa.map_(pa.string(), pa.struct([("a", pa.int64())]))
    table = catalog.create_table("n.m", pa.schema([("id", pa.int64()), ("m", kind)]))
    rows = [{"id": 1, "m": [("k", {"a": 5}), ("l", {"a": 6})]}, {"id": 2, "m": None}, {"id": 3, "m": []}]
    table.append(pa.Table.from_pylist(rows, schema=pa.schema([("id", pa.int64()), ("m", kind)])))
    with table.update_schema() as update:
        update.rename_column(("m", "value", "a"), "b")
    dataset = ParquetDataset(table.metadata_location, columns=["id"])
    assert ids(table.metadata_location) == [1, 2, 3]
    mapped = dataset.table.mapped
    assert mapped is not None
    stored = pq.read_table(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
    found = mapped.renamed("m", stored["m"].combine_chunks())
    assert found.to_pylist() == table.scan().to_arrow()["m"].to_pylist()
    assert found.to_pylist()[0] == [("k", {"b": 5}), ("l", {"b": 6})]


def test_what_would_be_read_wrongly_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = IcebergHistory(tmp_path / "w", 5)
    history.run(0)
    pq.write_table(pa.table({"id": [900], "part": ["a"]}), path := tmp_path / "w" / "n" / "t" / "data" / "own.parquet")
    history.table.add_files([path.as_uri()])
    with pytest.raises(DataError, match=r"columns without ids .*spark.read.table"):
        ParquetDataset(history.folder)
    outside = IcebergHistory(tmp_path / "w2", 5)
    pq.write_table(pa.table({"id": [900]}), elsewhere := tmp_path / "own.parquet")
    outside.table.add_files([elsewhere.as_uri()])
    with pytest.raises(DataError, match="a file outside of its folder"):
        ParquetDataset(outside.folder)
    empty = IcebergHistory(tmp_path / "w3", 5)
    with pytest.raises(DataError, match="has no rows: no file of this table is current"):
        ParquetDataset(empty.folder)
    history.folder.write_text("{}")
    with pytest.raises(DataError, match="metadata that pyiceberg cannot read"):
        ParquetDataset(history.folder)
    monkeypatch.setitem(sys.modules, "pyiceberg.table", None)
    with pytest.raises(LagomError, match=r"pip install 'lagom-spark\[iceberg\]'"):
        ParquetDataset(history.folder)


def test_a_file_without_a_column_by_which_it_is_partitioned_is_refused(tmp_path: Path) -> None:
    """Files of Hive have no partition columns; the column's values would be nulls."""
    history = IcebergHistory(tmp_path / "w", 6, is_partitioned=True)
    history.run(0)
    table = ParquetDataset(history.folder).table
    assert table.mapped is not None
    (task, *_) = history.table.scan().plan_files()
    stored = pq.read_schema(task.file.file_path.removeprefix("file://"))
    assert table.mapped.stored(stored)["part"] == "part"
    with pytest.raises(DataError, match="no column part, by which it is partitioned"):
        table.mapped.stored(stored.remove(stored.names.index("part")))
