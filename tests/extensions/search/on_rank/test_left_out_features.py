"""Features left out of data sets: judged by data that was changed by hand."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lagom.data import ParquetDataset, ParquetLoader, PetastormDataLoader
from lagom.extensions.search.on_rank.left_out_features import leave_out_features

X = torch.arange(20.0).reshape(5, 4)
Y = torch.arange(5)


def without(train: Any, test: Any, *features: Any, names: Any = (), value: Any = None, drop: bool = False) -> Any:
    """Return both sets without ``features``."""
    return leave_out_features(train, test, features, names, value, drop)


class Samples(Dataset[Any]):
    """Samples that are dicts, made one by one."""

    classes = ("a", "b")
    data = X

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "age": int(Y[index]), "text": "abc"}


class Stream(IterableDataset[Any]):
    """Pairs of a row and a label."""

    def __iter__(self) -> Any:
        yield from zip(X, Y.tolist(), strict=True)


def test_a_column_of_tensors_is_zero_in_both_sets() -> None:
    test = TensorDataset(X[:2] + 100, Y[:2])
    train = TensorDataset(X, Y)
    changed, other = without(train, test, 1)
    by_hand = X.clone()
    by_hand[:, 1] = 0
    assert type(changed) is TensorDataset
    assert torch.equal(changed.tensors[0], by_hand)
    assert torch.equal(other.tensors[0][:, 1], torch.zeros(2))
    assert torch.equal(other.tensors[0][:, 0], X[:2, 0] + 100)
    assert changed.tensors[1] is train.tensors[1]
    assert torch.equal(train.tensors[0], torch.arange(20.0).reshape(5, 4))


def test_columns_have_names_values_and_groups_and_can_be_dropped() -> None:
    train = TensorDataset(X, Y)
    names = ["a", "b", "c", "d"]
    assert torch.equal(without(train, None, "d", names=names, value=7)[0].tensors[0][:, 3], torch.full((5,), 7.0))
    assert torch.equal(without(train, None, "a", "c", names=names, drop=True)[0].tensors[0], X[:, [1, 3]])
    pair = without((X.numpy(), Y.numpy()), (X.numpy(), Y.numpy()), 0, value=0)
    assert pair[1][0][:, 0].sum() == 0
    assert pair[1][0][:, 1:].tolist() == X[:, 1:].tolist()


def test_a_network_without_a_column_trains_like_one_that_never_had_it() -> None:
    inputs, target = X / 10 + 50, X[:, :1] - X[:, 1:2]

    def loss(x: Any, width: int) -> float:
        layer = torch.nn.Linear(width, 1)
        with torch.no_grad():
            layer.weight.fill_(0.01)
            layer.bias.zero_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
        for _ in range(5):
            optimizer.zero_grad()
            found = torch.nn.functional.mse_loss(layer(x), target)
            found.backward()
            optimizer.step()
        return found.item()

    assert loss(without(inputs, None, 1)[0], 4) == pytest.approx(loss(inputs[:, [0, 2, 3]], 3), rel=1e-6)


def test_a_data_frame_keeps_its_columns_and_types() -> None:
    frame = pd.DataFrame({"age": [1.0, 2.0, np.nan], "sex": ["f", "m", "m"], "parch": [0, 2, 2], "y": [0, 1, 0]})
    frame["class"] = pd.Categorical(["x", "x", "y"])
    changed, test = without(frame, frame[:1], "age", "sex", "parch", "class")
    assert changed["age"].tolist() == [0.0] * 3
    assert (changed["sex"].tolist(), changed["parch"].tolist()) == (["m"] * 3, [0] * 3)
    assert changed["class"].tolist() == ["x"] * 3
    assert list(changed.dtypes) == list(frame.dtypes)
    assert list(changed.columns) == list(frame.columns)
    assert test["sex"].tolist() == ["m"]
    assert list(without(frame, None, "age", drop=True)[0].columns) == ["sex", "parch", "y", "class"]
    assert np.isnan(frame["age"][2])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Ten rows in two row groups."""
    columns = {
        "age": pa.array(np.linspace(0, 9, 10)),
        "sex": pa.array(["f", "m"] * 4 + ["f", "f"]),
        "sibsp": pa.array([None, 1, 1, 1, 2, 2, 2, 3, 3, 3], pa.int64()),
        "pixels": pa.array([[float(n), 2.0] for n in range(10)], pa.list_(pa.float32(), 2)),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=5)
    return tmp_path


def test_a_column_of_a_table_has_one_value_in_every_loader(table: Path) -> None:
    data = ParquetDataset(table, nulls={"sibsp": "mask"})
    changed, _ = without(data, None, "age", "sex", "pixels")
    assert isinstance(changed, ParquetDataset)
    plain = next(iter(DataLoader(data, 10)))
    for loader in (
        DataLoader(changed, 10),
        ParquetLoader(changed, 10),
        PetastormDataLoader(changed, 10, shuffle=False),
    ):
        batch = next(iter(loader))
        assert batch["age"].tolist() == [0.0] * 10
        assert batch["sex"] == ["f"] * 10
        assert torch.equal(batch["pixels"], torch.zeros(10, 2))
        assert batch["pixels"].dtype == torch.float32
        assert torch.equal(batch["sibsp"], plain["sibsp"])
    shuffled = list(ParquetLoader(changed, 4, shuffle=True, seed=1))
    assert sorted(torch.cat([one["sibsp"] for one in shuffled]).tolist()) == sorted(plain["sibsp"].tolist())
    assert {value for one in shuffled for value in one["age"].tolist()} == {0.0}
    assert changed[3]["age"] == 0


def test_a_column_of_a_table_with_nulls_or_dropped(table: Path) -> None:
    data = ParquetDataset(table, nulls={"sibsp": "mask"}, columns=["age", "sibsp"])
    batch = next(iter(DataLoader(without(data, None, "sibsp", value=5)[0], 10)))
    assert (batch["sibsp"].tolist(), batch["sibsp__valid"].tolist()) == ([5] * 10, [True] * 10)
    assert without(data, None, "sibsp", drop=True)[0].columns == ["age"]
    assert next(iter(DataLoader(without(data, None, "sibsp", drop=True)[0], 10))).keys() == {"age"}


def test_samples_that_are_made_one_by_one_have_zeros() -> None:
    changed, _ = without(Samples(), None, "age", "text", "x")
    assert changed[2]["age"] == 0
    batch = next(iter(DataLoader(changed, 5)))
    assert batch["age"].tolist() == [0] * 5
    assert batch["text"] == [""] * 5
    assert torch.equal(batch["x"], torch.zeros(5, 4))
    assert len(changed) == 5
    assert changed.classes == ("a", "b")
    with pytest.raises(AttributeError, match=r"Samples\.data has the features"):
        _ = changed.data
    assert set(without(Samples(), None, "age", drop=True)[0][0]) == {"x", "text"}
    assert without(Samples(), None, "age", value=30)[0][4]["age"] == 30


def test_streams_lists_named_tuples_subsets_and_loaders_are_changed_too() -> None:
    assert [x.tolist()[2] for x, _ in without(Stream(), None, 2)[0]] == [0.0] * 5
    assert [x.tolist()[1] for x, _ in Stream()] == X[:, 1].tolist()
    pair = namedtuple("pair", "x y")
    changed = without([pair({"a": 1, "b": 2}, 3)], None, "a")[0]
    assert changed == [pair({"a": 0, "b": 2}, 3)]
    subset = without(Subset(TensorDataset(X, Y), [0, 3]), None, 0)[0]
    assert [subset[place][0][0].item() for place in range(2)] == [0.0, 0.0]
    loader = DataLoader(TensorDataset(X, Y), 5)
    assert next(iter(without(loader, None, 0)[0]))[0][:, 0].tolist() == [0.0] * 5
    assert next(iter(loader))[0][:, 0].tolist() == X[:, 0].tolist()
    columns = without({"a": X[:, 0], "y": Y, "b": ["p", "q", "q"]}, None, "a", "b")[0]
    assert (columns["a"].tolist(), columns["b"]) == ([0.0] * 5, ["q"] * 3)


def test_columns_of_lists_keep_the_lengths_of_the_lists() -> None:
    data = {
        "n": [[1, 2], [3]],
        "even": [[1, 2], [3, 4]],
        "s": [["p", "q"], [], ["q"]],
        "t": [torch.ones(2), torch.ones(1)],
    }
    changed = without(data, None, *data)[0]
    assert [one.tolist() for one in changed.pop("t")] == [[0.0, 0.0], [0.0]]
    assert changed == {"n": [[0, 0], [0]], "even": [[0, 0], [0, 0]], "s": [["q", "q"], [], ["q"]]}
    assert without({"n": [[1, 2], [3]]}, None, "n", value=[7])[0] == {"n": [[7], [7]]}


def test_a_function_that_makes_a_set_makes_the_changed_one_once() -> None:
    calls = []

    def make() -> Any:
        calls.append(1)
        return TensorDataset(X, Y)

    train, test = without(make, lambda: TensorDataset(X[1:2], Y[:1]), 1)
    assert calls == []
    assert test()[0][0].tolist() == [4.0, 0.0, 6.0, 7.0]
    assert train()[0][0][1].item() == 0.0
    assert calls == [1]


@pytest.mark.parametrize(
    ("data", "feature", "message"),
    [
        (
            pd.DataFrame({"age": [1.0], "fare": [2.0]}),
            "fair",
            r"DataFrame has no feature 'fair'; did you mean 'fare'\?",
        ),
        (TensorDataset(X, Y), 4, "TensorDataset has no feature 4; it has 0, 1, 2, 3"),
        (TensorDataset(X, Y), "age", r"no feature 'age'; name its columns by AblationStudy\(feature_names=\[...\]\)"),
    ],
)
def test_an_unknown_feature_is_named_with_the_nearest(data: Any, feature: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        without(data, None, feature)


def test_a_sample_without_the_feature_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sample has no feature 'agee'; did you mean 'age'\?"):
        without(Samples(), None, "agee")[0][0]
    with pytest.raises(ValueError, match="sample that is a int"):
        without([1, 2], None, "a")
