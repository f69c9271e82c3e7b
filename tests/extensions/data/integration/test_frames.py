"""``lagom.extensions.data.dataframes``: Spark DataFrames as data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom.errors import DataError
from lagom.extensions.data import dataframes
from lagom.extensions.data.dataframes import forget_frames, write_frame
from tests.integration import programs

KINDS = pytest.mark.parametrize("spark", ["local[2]", "standalone", "connect"], indirect=True, scope="session")
LOCAL = pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")


def train(module: Any, train_set: Any, test_set: Any) -> Any:
    """Two epochs over batches that are dicts or pairs; the weights, and the sum of a column."""
    import torch

    model = module(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(train_set, batch_size=5):
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            optimizer.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        total = sum(
            (batch["y"] if isinstance(batch, dict) else batch[1]).sum().item() for batch in DataLoader(test_set, 4)
        )
    return [p.detach() for p in model.parameters()], total


@KINDS
@pytest.mark.soak_on("connect")
def test_a_frame_trains_as_its_rows_do(spark: Any) -> None:
    columns = ("array(id / 37, 1 - id / 37) x", "cast(id % 7 as double) y")
    with forget_frames():
        result = programs.run(
            train,
            2,
            module=torch.nn.Linear,
            train_set=spark.range(0, 37, numPartitions=3).selectExpr(*columns),
            test_set=spark.range(0, 11, numPartitions=1).selectExpr(*columns),
        )
    ids = torch.arange(37, dtype=torch.float64)
    rows = TensorDataset(torch.stack([ids / 37, 1 - ids / 37], 1), ids % 7)
    torch.manual_seed(0)
    weights, total = train(torch.nn.Linear, rows, TensorDataset(*rows[:11]))
    for found, sum_of_test in result.per_rank:
        for one, other in zip(found, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert sum_of_test == total


@LOCAL
def test_files_are_used_again_for_the_same_plan_over_the_same_files(spark: Any, tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    spark.range(0, 10, 1, 1).write.parquet(source)

    def url(frame: Any) -> str:
        return str(write_frame({"train_set": frame, "hparams": {}})["train_set"].url)

    with forget_frames():
        first = url(spark.read.parquet(source).where("id > 3"))
        assert url(spark.read.parquet(source).where("id > 3")) == first
        assert url(spark.read.parquet(source).where("id > 4")) != first
        spark.range(0, 20, 1, 1).write.mode("overwrite").parquet(source)
        second = url(spark.read.parquet(source).where("id > 3"))
        assert second != first
        assert spark.read.parquet(second).count() == 16
        made = spark.range(0, 2, 1, 1)
        assert url(made) == url(made)
        paths = [Path(one.url.removeprefix("file://")) for one in dataframes.kept_frames]
        assert len(paths) == dataframes.MAX_KEPT_FRAMES
        url(spark.range(0, 3, 1, 1))
        assert not paths[0].exists()
        assert paths[1].exists()
        paths.append(paths[1].parent)
    assert not any(path.exists() for path in paths)


@LOCAL
def test_both_spellings_of_the_data_sets_are_handed_over(spark: Any, tmp_path: Path) -> None:
    spark.conf.set(dataframes.CACHE, f"file://{tmp_path}/cache")
    frame = spark.range(5)
    try:
        with forget_frames():
            found = write_frame({"train_set": frame, "test_set": "a path", "dataset": [frame, "a path"]})
            assert found["dataset"] == [found["train_set"], "a path"]
            assert found["train_set"].url.startswith(f"file://{tmp_path}/cache/lagom-")
            assert len(found["train_set"]()) == 5
    finally:
        spark.conf.unset(dataframes.CACHE)
    assert list((tmp_path / "cache").iterdir()) == []


@LOCAL
def test_what_cannot_be_handed_over_is_said_before_anything_is_written(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for column, kind in (
        ("map('a', 1)", "map"),
        ("array(map('a', 1))", "array<map>"),
        ("array(array('a'))", "array<string>"),
        ("array(struct(1, 2))", "array<struct>"),
        ("struct(array(null))", "void"),
        ("null", "void"),
    ):
        with pytest.raises(ValueError, match=rf"train_set is a DataFrame whose column 'm' has the type {kind}.*drop"):
            write_frame({"train_set": spark.range(3).selectExpr("id", f"{column} m")})
    monkeypatch.setattr(dataframes, "cache_folder", lambda session: None)
    monkeypatch.setattr(dataframes, "MAX_COLLECTED_BYTES", 100)
    with pytest.raises(DataError, match=r"test_set is a DataFrame of 0 MB by Spark's estimate.*spark.lagom.cacheDir"):
        write_frame({"test_set": spark.range(1000)})
    assert not dataframes.kept_frames
    assert len(write_frame({"test_set": spark.range(3)})["test_set"]()) == 3
