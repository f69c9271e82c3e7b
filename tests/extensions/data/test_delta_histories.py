"""``data.sources``: Delta tables with deletion vectors and column mapping, as Databricks makes them by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from lagom.data import ParquetDataset, ParquetLoader
from tests.extensions.data.delta_history import History

MODES = ("none", "name", "id")


def listed(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch, with None for nulls."""
    names = [name for name in batch if not name.endswith("__valid")]
    columns = {}
    for name in names:
        values = batch[name]
        cells = listed(values) if isinstance(values, dict) else values
        cells = cells.tolist() if isinstance(cells, torch.Tensor) else cells
        valid = batch.get(f"{name}__valid")
        columns[name] = cells if valid is None else [c if v else None for c, v in zip(cells, valid, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows with fields of None in place of a struct that is None, as batches have them."""
    known: dict[str, Any] = next((row["s"] for row in rows.values() if row["s"] is not None), {})
    return {one: {**row, "s": row["s"] or dict.fromkeys(known)} for one, row in rows.items()}


def check(history: History) -> None:
    """Compare what lagom reads with the history's rows: in order, shuffled, filtered, and resumed in an epoch."""
    wanted = plain(history.rows())
    dataset = ParquetDataset(history.folder, nulls="mask")
    assert len(dataset) == len(wanted)
    assert sorted(dataset.columns) == sorted(field["name"] for field in history.fields)
    for shuffle in (False, True):
        found = [row for batch in ParquetLoader(dataset, 5, shuffle=shuffle, seed=3) for row in listed(batch)]
        assert {row["id"]: row for row in found} == wanted
        assert len(found) == len(wanted)
    middle = sorted(wanted)[len(wanted) // 2]
    some = ParquetDataset(history.folder, nulls="mask", filters=[("id", ">=", middle)])
    found = [row for batch in ParquetLoader(some, 5) for row in listed(batch)]
    assert {row["id"]: row for row in found} == {one: row for one, row in wanted.items() if one >= middle}
    assert len(some) == len(found)
    for value in {row["part"] for row in wanted.values()} - {None}:
        alone = ParquetDataset(history.folder, columns=["part"], filters=[("part", "=", value)])
        parts = [part for batch in ParquetLoader(alone, 5) for part in batch["part"]]
        assert parts == [row["part"] for row in wanted.values() if row["part"] == value]
    loader = ParquetLoader(ParquetDataset(dataset, columns=["id"]), 3, shuffle=True, seed=5)
    whole = [batch["id"].tolist() for batch in loader]
    loader = ParquetLoader(ParquetDataset(dataset, columns=["id"]), 3, shuffle=True, seed=5)
    first = next(iter(loader))["id"].tolist()
    resumed = ParquetLoader(ParquetDataset(history.folder, columns=["id"]), 3, shuffle=True, seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert [first, *(batch["id"].tolist() for batch in resumed)] == whole
    dataset.close()
    loader.dataset.close()  # type: ignore[attr-defined]


def check_against_deltalake(history: History) -> None:
    """Compare the history's rows with those that deltalake reads, which shows that the table is written rightly."""
    from deltalake import DeltaTable, QueryBuilder

    query = QueryBuilder().register("t", DeltaTable(str(history.folder)))
    found = pa.table(query.execute("select id, part from t")).to_pylist()
    assert {row["id"]: row["part"] for row in found} == {one: row["part"] for one, row in history.rows().items()}


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_random_history_leaves_the_rows_that_it_should(tmp_path: Path, mode: str, is_partitioned: bool) -> None:
    history = History(tmp_path / "table", 7 + is_partitioned, mode, is_partitioned=is_partitioned)
    history.run(10)
    check(history)
    if mode != "id":  # deltalake finds columns by name there, too
        check_against_deltalake(history)


@pytest.mark.soak  # the test above has six histories
@pytest.mark.parametrize("seed", range(200))
def test_random_histories_leave_the_rows_that_they_should(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / "table", seed, MODES[seed % 3], is_partitioned=seed % 2 == 1)
    history.run(4 + seed % 12)
    check(history)
    if seed % 5 == 0 and history.mode != "id":
        check_against_deltalake(history)
