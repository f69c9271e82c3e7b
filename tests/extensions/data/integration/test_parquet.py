"""Data sets that Spark wrote, and runs on Spark that read them."""

from __future__ import annotations

import datetime
import decimal
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lagom.data import ParquetDataset, ParquetLoader
from tests.extensions.data.write_rows import image, schema
from tests.integration import programs
from tests.ranks import run_ranks

WRITTEN = Path(__file__).parent.parent / "extensions" / "data" / "petastorm_0_12_1"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session"),
]


# tests/extensions/data/test_tensor_columns.py has such columns by default
@pytest.mark.parametrize(("legacy", "times"), [("false", "INT96"), ("true", "TIMESTAMP_MICROS")])
def test_types_of_spark_become_tensors(spark: Any, tmp_path: Path, legacy: str, times: str) -> None:
    from pyspark.ml.linalg import Vectors

    moment = datetime.datetime(1970, 1, 2, tzinfo=datetime.timezone.utc)
    rows = [
        (
            number,
            float(number),
            f"t{number}",
            number % 2 == 0,
            decimal.Decimal(number) / 4,
            moment,
            [float(number), 1.0],
            Vectors.dense([number, 2.0]) if number % 3 else Vectors.sparse(2, [1], [5.0]),
            {"a": number, "b": [number]},
            number % 2,
        )
        for number in range(20)
    ]
    kinds = "i long, f double, t string, b boolean, d decimal(9,2), m timestamp, l array<double>"
    frame = spark.createDataFrame(
        [(*row[:7], row[8], *row[9:]) for row in rows], f"{kinds}, s struct<a: long, b: array<int>>, p int"
    )
    vectors = spark.createDataFrame([(row[0], row[7]) for row in rows], ["i", "v"])
    spark.conf.set("spark.sql.parquet.writeLegacyFormat", legacy)
    spark.conf.set("spark.sql.parquet.outputTimestampType", times)
    frame.join(vectors, "i").repartition(3).write.partitionBy("p").parquet(str(tmp_path / "table"))
    (found,) = ParquetLoader(ParquetDataset(tmp_path / "table"), 99)
    order = found["i"]
    assert sorted(order.tolist()) == list(range(20))
    assert found["f"].tolist() == order.tolist()
    assert found["t"] == [f"t{number}" for number in order.tolist()]
    assert found["b"].tolist() == [number % 2 == 0 for number in order.tolist()]
    assert found["d"].tolist() == [number / 4 for number in order.tolist()]
    assert found["m"].tolist() == [86_400 * 1_000_000] * 20
    assert found["l"].tolist() == [[number, 1] for number in order.tolist()]
    assert found["v"].tolist() == [[number, 2] if number % 3 else [0, 5] for number in order.tolist()]
    assert found["s"]["a"].tolist() == order.tolist()
    assert found["s"]["b"].tolist() == [[number] for number in order.tolist()]
    assert found["p"].tolist() == [number % 2 for number in order.tolist()]


# tests/extensions/compat/test_maggy.py has such a program by default
def test_a_program_of_maggys_shape_trains_on_paths(spark: Any, tmp_path: Path) -> None:
    spark.range(0, 37, numPartitions=3).write.parquet(str(tmp_path / "test"))

    def train(module: Any, hparams: Any, train_set: Any, test_set: Any) -> Any:
        import torch

        from lagom import PetastormDataLoader

        def f(row: Any) -> Any:
            return {"x": row["png"].astype("float32").reshape(-1) / 255, "y": float(row["price"]), "id": row["id"]}

        model = module(60, 1)
        optimizer = torch.optim.SGD(model.parameters(), hparams["lr"])
        loader = PetastormDataLoader(train_set, batch_size=4, transform_spec=f)
        seen: list[list[int]] = []
        steps = 0
        for _ in range(2):
            seen.append([])
            for batch in loader:
                seen[-1] += batch["id"].tolist()
                optimizer.zero_grad()
                (model(batch["x"])[:, 0] - batch["y"].float()).square().mean().backward()
                optimizer.step()
                steps += 1
        with torch.no_grad():
            total = sum(batch["id"].sum().item() for batch in PetastormDataLoader(test_set, batch_size=64))
        return {"seen": seen, "steps": steps, "total": total, "weight": model.weight.sum().item()}

    result = programs.run(
        train,
        2,
        module=torch.nn.Linear,
        hparams={"lr": 0.01},
        train_set=str(WRITTEN),
        test_set=str(tmp_path / "test"),
        batches="split",
    )
    first, second = result.per_rank
    assert first["steps"] == second["steps"] == 10
    assert first["total"] == second["total"] == sum(range(37))
    assert first["weight"] == second["weight"]
    for ours, theirs in zip(first["seen"], second["seen"], strict=True):
        assert sorted(ours + theirs) == list(range(20))
        assert len(ours) == len(theirs) == 10


# tests/extensions/compat/test_petastorm.py shows it by default
def test_what_petastorm_materialised_trains_its_own_programs_and_others(spark: Any, tmp_path: Path) -> None:
    importlib.import_module("lagom.extensions.compat.petastorm")
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import dict_to_spark_row

    rows = schema()
    url = f"file://{tmp_path}/table"
    with materialize_dataset(spark, url, rows, row_group_size_mb=1):
        made = spark.sparkContext.parallelize(range(20), 3).map(lambda n: {"id": np.int64(n), "image": image(n)})
        encoded = made.map(lambda row: dict_to_spark_row(rows, row))
        spark.createDataFrame(encoded, rows.as_spark_schema()).write.parquet(url)

    def train(module: Any, train_set: Any) -> Any:
        import torch
        from petastorm import make_reader
        from petastorm.pytorch import DataLoader

        from lagom import PetastormDataLoader

        model = module(6, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen: list[set[int]] = []

        def epoch(loader: Any) -> None:
            seen.append(set())
            for batch in loader:
                seen[-1] |= set(batch["id"].tolist())
                optimizer.zero_grad()
                model(batch["image"].flatten(1)).square().mean().backward()
                optimizer.step()

        with DataLoader(make_reader(train_set, workers_count=2), batch_size=3) as loader:
            epoch(loader)
        epoch(PetastormDataLoader(train_set, batch_size=3))
        return {"seen": seen, "weight": model.weight.sum().item()}

    result = programs.run(train, 2, module=torch.nn.Linear, train_set=url, batches="split")
    first, second = result.per_rank
    assert first["weight"] == second["weight"]
    for ours, theirs in zip(first["seen"], second["seen"], strict=True):
        assert ours | theirs == set(range(20))
        assert not ours & theirs


def test_forked_ranks_leave_the_session_to_the_process_that_has_it(spark: Any) -> None:
    """``run_ranks`` forks from processes in which a session of another test is open, and MLflow asks for one."""
    from pyspark.sql import SparkSession

    client = spark._sc._gateway._gateway_client  # whatever is collected tells Java through it
    assert client.is_connected

    def active(_: object) -> list[bool]:
        return [SparkSession.getActiveSession() is None, client.is_connected]

    assert run_ranks(3, active) == [[True, False]] * 3
    assert client.is_connected
    assert SparkSession.getActiveSession() is not None
    assert spark.range(5).count() == 5
