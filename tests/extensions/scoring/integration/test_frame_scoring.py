"""Spark DataFrames are scored on Spark: the numbers of one process, every row once, and errors that name the row."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lagom import Predictor
from lagom.errors import PayloadError
from tests.extensions.scoring.models import churn, table

LOCAL = pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
KINDS = pytest.mark.parametrize("spark", ["local[2]", "standalone", "connect"], indirect=True, scope="session")
NUM_ROWS = 300


def frame(spark: Any) -> Any:
    """``table`` in four partitions, one of which has no rows; with a column of a type that Arrow refuses."""
    made = spark.createDataFrame(table(NUM_ROWS)).repartitionByRange(3, "customer")
    return made.union(made.where("customer < 0")).selectExpr("*", "make_ym_interval(1, 2) AS `an interval`")


@KINDS
@pytest.mark.soak_on("connect")
def test_the_outputs_are_those_of_one_process_row_by_row(spark: Any) -> None:
    model = churn()
    rows = frame(spark)
    scored = Predictor(model, key="customer").predict(rows)
    assert scored.columns == [*rows.columns, "prediction"]
    assert scored.schema["prediction"].dataType.simpleString() == "float"
    found = scored.drop("an interval").collect()
    wanted = Predictor(model).predict(table(NUM_ROWS))
    assert [row["customer"] for row in found] == wanted["customer"].tolist()
    assert [row["text"] for row in found] == wanted["text"].tolist()
    np.testing.assert_allclose([row["prediction"] for row in found], wanted["prediction"], rtol=1e-5, atol=1e-6)


@LOCAL
def test_several_outputs_are_columns_with_their_types_and_are_computed_once(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "calls")

    def made(output: Any) -> dict[str, Any]:
        with open(path, "a") as file:
            file.write(f"{len(output)}\n")
        score = torch.sigmoid(output[:, 0])
        return {
            "a score": score,
            "label": ["yes" if one > 0.5 else "no" for one in score],
            "pair": output.expand(-1, 2),
        }

    scored = Predictor(churn(), postprocess=made).predict(frame(spark))
    types = {name: scored.schema[name].dataType.simpleString() for name in scored.columns[-3:]}
    assert types == {"a score": "float", "label": "string", "pair": "array<float>"}
    Path(path).unlink()  # of the first rows, for the types
    found = scored.where("`a score` > 0.5").select("customer", "a score", "label").collect()
    assert sum(map(int, Path(path).read_text().split())) == NUM_ROWS
    local = Predictor(churn(), postprocess=lambda output: {"s": torch.sigmoid(output[:, 0])}).predict(table(NUM_ROWS))
    assert [row["customer"] for row in found] == local["customer"][local["s"] > 0.5].tolist()
    assert {row["label"] for row in found} == {"yes"}


@LOCAL
def test_a_bad_row_and_nulls_are_named_and_nulls_may_be_skipped(spark: Any) -> None:
    rows = frame(spark)
    bad = rows.selectExpr("customer", "if(customer = 1250, 99, plan) AS plan", "usage", "age")
    with pytest.raises(Exception, match=r"row \d+ of partition \d \(customer=1250\): IndexError"):
        Predictor(churn(), key="customer").predict(bad).collect()
    some = rows.selectExpr("customer", "plan", "usage", "if(customer % 100 = 7, null, age) AS age")
    with pytest.raises(
        Exception, match=r"row \d+ of partition \d \(plan=.*age=None\): column 'age' has \d nulls? in \d+ rows"
    ):
        Predictor(churn()).predict(some).collect()
    found = Predictor(churn(), nulls="null").predict(some).collect()
    assert [row["customer"] for row in found if row["prediction"] is None] == [1007, 1107, 1207]
    assert Predictor(churn(), nulls={"age": 0.0}).predict(some).where("prediction is null").count() == 0


@LOCAL
def test_errors_come_before_a_job(spark: Any) -> None:
    rows = frame(spark)
    with pytest.raises(ValueError, match="no column 'age'"):
        Predictor(churn()).predict(rows.drop("age"))
    with pytest.raises(ValueError, match="no rows that can be scored"):
        Predictor(churn()).predict(rows.where("customer < 0"))
    empty = Predictor(churn(), outputs={"score": "double"}).predict(rows.where("customer < 0"))
    assert (empty.count(), empty.schema["score"].dataType.simpleString()) == (0, "double")
    lock = threading.Lock()
    with pytest.raises(PayloadError, match=r"lock.* cannot be sent: TypeError"):
        Predictor(churn(), postprocess=lambda output: (lock, output)[1]).predict(rows)


@LOCAL
def test_sparks_vectors_lists_and_older_sparks(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import functions

    rows = [(Vectors.dense([1.0, 2.0]), [1.0, 2.0]), (Vectors.sparse(2, [1], [5.0]), [0.0, 5.0])]
    made = spark.createDataFrame(rows, ["vector", "list"]).repartition(1)
    linear = torch.nn.Linear(2, 1)
    for name in ("vector", "list"):
        found = Predictor(linear, inputs=name).predict(made).collect()
        wanted = linear(torch.tensor([list(row["list"]) for row in found]))[:, 0].tolist()
        np.testing.assert_allclose([row["prediction"] for row in found], wanted, rtol=1e-5)
    monkeypatch.delattr(functions, "arrow_udf", raising=False)  # as before Spark 4.1
    plain = frame(spark).drop("an interval")
    old = Predictor(churn(), postprocess=lambda output: {"a": output[:, 0], "b c": output.expand(-1, 2)}).predict(plain)
    wanted = Predictor(churn()).predict(table(NUM_ROWS))["prediction"]
    assert old.columns == [*plain.columns, "a", "b c"]
    np.testing.assert_allclose([row["a"] for row in old.collect()], wanted, rtol=1e-5, atol=1e-6)


@LOCAL
def test_a_path_is_read_by_the_active_session(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rows")
    frame(spark).drop("an interval").write.parquet(path)
    predictor = Predictor(churn())
    scored = predictor.predict(path)
    assert "pyspark" in type(scored).__module__
    assert scored.count() == NUM_ROWS
    local = predictor.predict(path, launcher="local").to_pandas().set_index("customer")["prediction"]
    to = str(tmp_path / "scores")
    assert predictor.predict(path, to=to) == to
    written = spark.read.parquet(to).toPandas().set_index("customer")["prediction"]
    np.testing.assert_allclose(written.sort_index(), local.sort_index(), rtol=1e-5, atol=1e-6)


@LOCAL
def test_a_worker_loads_the_model_once_for_all_of_its_tasks(spark: Any, tmp_path: Path) -> None:
    class Loaded(torch.nn.Linear):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            with open(tmp_path / "loads", "a") as file:
                file.write("x")

    scored = Predictor(Loaded(2, 1), inputs=[["usage", "age"]]).predict(frame(spark).repartition(20))
    (tmp_path / "loads").unlink(missing_ok=True)
    assert scored.where("prediction is null").count() == 0
    assert scored.where("prediction is null").count() == 0
    assert 1 <= len((tmp_path / "loads").read_text()) <= 2  # a Python worker in each slot


@LOCAL
def test_mlflows_udf_gives_the_outputs_of_a_saved_model(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # whose thread would be left
    mlflow = pytest.importorskip("mlflow.pyfunc")
    rows = frame(spark).drop("an interval")
    Predictor(churn()).save_mlflow(tmp_path / "model", example=rows)
    udf = mlflow.spark_udf(spark, str(tmp_path / "model"), env_manager="local")
    found = [row[0] for row in rows.select(udf("plan", "usage", "age")).collect()]
    wanted = Predictor(churn()).predict(table(NUM_ROWS))["prediction"]
    np.testing.assert_allclose([getattr(one, "prediction", one) for one in found], wanted, rtol=1e-5, atol=1e-6)
