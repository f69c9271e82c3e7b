"""Paths and DataFrames that a ``DataLoader`` cannot read are one clear error, as early as it can be known."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.program.unreadable_data import unreadable

FRAME = pandas.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})


def polars_frame() -> Any:
    """Return a DataFrame of polars, as far as its class tells: polars need not be installed."""
    kind = type("DataFrame", (), {"__module__": "polars.dataframe.frame", "__len__": lambda self: 2})
    return kind()


def run(train: Callable[..., Any], launcher: Any = "inline", **fields: Any) -> Any:
    return experiment.lagom(train, TorchDistributedConfig(launcher=launcher, run_dir=None, **fields))["test result"]


def loads(train_set: Any, epochs: int = 1) -> int:
    Path("has_begun").touch()
    for _ in range(epochs):
        for _ in DataLoader(train_set, batch_size=2, shuffle=True):
            pass
    return len(train_set)


def loads_by_name(test_set: Any) -> int:
    Path("has_begun").touch()
    return sum(1 for _ in data.DataLoader(batch_size=2, dataset=test_set))


@pytest.mark.parametrize(
    ("train_set", "wanted"),
    [
        ("hdfs:///data/train", r"path 'hdfs:///data/train', which is no data set; want lagom.data.ParquetDataset"),
        (
            "folder with spaces",
            r"path .*ParquetDataset\(path\) for Parquet, torchvision.datasets.ImageFolder\(path\) for",
        ),
        (Path("data"), r"path PosixPath\('data'\), which is no data set"),
        (FRAME, r"a pandas DataFrame, whose rows are no samples; want a TensorDataset .* \(frame.to_parquet\)"),
        (polars_frame(), r"a polars DataFrame, whose rows are no samples"),
    ],
)
def test_what_a_loader_certainly_gets_is_refused_before_anything_starts(
    train_set: Any, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder with spaces")
    for function, name in ((loads, "train_set"), (loads_by_name, "test_set")):
        with pytest.raises(ValueError, match=rf"gives {name} to a DataLoader as it is, and it is .*{wanted}"):
            run(function, **{name: train_set})
    assert os.listdir() == ["folder with spaces"]


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=pytest.mark.soak)])
@pytest.mark.parametrize("data_set", ["hdfs:///data/train", Path("data"), FRAME])
def test_what_turns_out_later_is_refused_where_the_loader_is_made(data_set: Any, launcher: str) -> None:
    def train(train_set: Any) -> None:
        if len(os.fspath(data_set) if isinstance(data_set, Path) else data_set) > 0:
            DataLoader(train_set, batch_size=2)

    with pytest.raises(ValueError, match=r"the data set of a DataLoader is (a pandas DataFrame|the path .*)"):
        run(train, launcher, train_set=data_set)


def opens(train_set: str) -> int:
    if isinstance(train_set, str):
        return len(list(DataLoader(TensorDataset(torch.rand(4)))))
    return len(list(DataLoader(train_set)))


def makes_tensors(train_set: Any) -> Any:
    columns = TensorDataset(torch.tensor(train_set["x"].to_numpy()), torch.tensor(train_set["y"].to_numpy()))
    return sum(y.sum().item() for _, y in DataLoader(columns, batch_size=2))


def has_a_sampler(train_set: Any) -> int:
    return len(list(DataLoader(train_set, sampler=["x", "y"], collate_fn=list)))


def is_numbered(train_set: Any) -> int:
    return len(list(DataLoader(train_set, collate_fn=list)))


def has_letters(train_set: Any) -> str:
    return "".join(letter for (letter,) in DataLoader(train_set))


@pytest.mark.parametrize(
    ("function", "train_set", "wanted"),
    [
        (opens, "hdfs:///data/train", 4),
        (makes_tensors, FRAME, 7.0),
        (has_a_sampler, FRAME, 2),
        (is_numbered, pandas.DataFrame([[1, 2], [3, 4]]), 2),
        (has_letters, "to be, or not to be", "to be, or not to be"),
    ],
)
def test_what_one_process_reads_is_read(function: Callable[..., Any], train_set: Any, wanted: Any) -> None:
    assert run(function, train_set=train_set) == function(train_set) == wanted


def test_a_loader_that_reads_paths_itself_gets_them() -> None:
    class Lines(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([self.dataset])

    assert run(lambda train_set: next(iter(Lines(train_set))), train_set="/data/train") == "/data/train"


def test_a_frame_of_polars_may_have_a_function_that_joins_its_rows() -> None:
    assert unreadable(polars_frame(), {"batch_size": 2}) is not None
    assert unreadable(polars_frame(), {"batch_size": 2, "collate_fn": list}) is None
    assert unreadable(polars_frame(), {"batch_size": None}) is None


def test_other_frames_of_spark_are_named() -> None:
    kind = type("DataFrame", (), {"__module__": "pyspark.pandas.frame"})
    with pytest.raises(ValueError, match=r"train_set is a DataFrame of pyspark.pandas; want .*frame.to_spark\(\)"):
        run(lambda train_set: None, train_set=kind())
    classic = type("DataFrame", (), {"__module__": "pyspark.sql.classic.dataframe"})()
    with pytest.raises(ValueError, match=r"is a Spark DataFrame, which ranks read only as train_set= or test_set="):
        run(lambda lr: DataLoader(lr), hparams={"lr": classic})


def test_wrong_arguments_of_a_loader_get_torchs_own_error() -> None:
    def train(options: dict[str, Any]) -> int:
        return len(list(DataLoader(TensorDataset(torch.rand(4)), **options)))

    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        run(train, hparams={"options": {"size": 3}})
    assert run(train, hparams={"options": {"batch_size": 2}}) == 2
