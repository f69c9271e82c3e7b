"""``data.sources``: Delta tables with deletion vectors and column mapping, as Databricks makes them by itself."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.extensions.data.delta_history import History
from tests.extensions.data.table_checks import check

MODES = ("none", "name", "id")


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
