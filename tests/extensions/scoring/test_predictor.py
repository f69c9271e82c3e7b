"""``lagom.Predictor`` in this process: the outputs are those of a loop by hand, and errors name the row."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, StackDataset, TensorDataset

from lagom import Predictor
from lagom.data import ParquetDataset
from lagom.errors import DataError
from tests.extensions.scoring.models import churn, scores, table


@pytest.mark.parametrize("batch_size", [None, 1, 7])
def test_rows_get_the_outputs_of_the_model_in_evaluation_mode(batch_size: int | None) -> None:
    model = churn()
    before = copy.deepcopy(model.state_dict())
    rows = table().set_index("text")
    found = Predictor(model, batch_size=batch_size).predict(rows)
    np.testing.assert_allclose(found["prediction"], scores(model, rows), rtol=1e-5, atol=1e-6)
    pd.testing.assert_frame_equal(found.drop(columns="prediction"), rows)
    assert found["prediction"].dtype == np.float32
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_a_kind_of_device_that_lagom_does_not_use_does_not_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))  # it has no float64
    model, rows = churn(), table()
    np.testing.assert_allclose(Predictor(model).predict(rows)["prediction"], scores(model, rows), rtol=1e-5, atol=1e-6)


def test_every_kind_of_table_gets_the_same_outputs(tmp_path: Path) -> None:
    model, rows = churn(), table(100)
    predictor = Predictor(model)
    wanted = predictor.predict(rows)
    arrow = pa.Table.from_pandas(rows)
    chunked = pa.concat_tables([arrow.slice(0, 30), arrow.slice(30)])
    (tmp_path / "rows").mkdir()
    pq.write_table(arrow.slice(0, 60), tmp_path / "rows" / "a.parquet", row_group_size=25)
    pq.write_table(arrow.slice(60), tmp_path / "rows" / "b.parquet")
    path = str(tmp_path / "rows")
    for data in (arrow, chunked, path, tmp_path / "rows", ParquetDataset(path)):
        found = predictor.predict(data)
        assert isinstance(found, pa.Table)
        pd.testing.assert_frame_equal(found.to_pandas(), wanted)
    assert predictor.predict(arrow.to_batches()[0]).to_pandas().equals(wanted)
    some = ParquetDataset(path, columns=["plan", "usage", "age"], filters=[("customer", ">=", 1090)])
    assert predictor.predict(some)["prediction"].to_pylist() == wanted["prediction"].tolist()[90:]


def test_a_path_is_scored_to_a_file_that_is_whole_or_not_there(tmp_path: Path) -> None:
    rows = table(100)
    pq.write_table(pa.Table.from_pandas(rows), tmp_path / "rows.parquet", row_group_size=20)
    to = tmp_path / "new" / "scores.parquet"
    predictor = Predictor(churn())
    assert predictor.predict(tmp_path / "rows.parquet", to=to) == str(to)
    pd.testing.assert_frame_equal(pq.read_table(to).to_pandas(), predictor.predict(rows))
    with pytest.raises(ValueError, match=r"scores.parquet exists already"):
        predictor.predict(tmp_path / "rows.parquet", to=to)
    rows.loc[77, "plan"] = 99
    pq.write_table(pa.Table.from_pandas(rows), tmp_path / "bad.parquet", row_group_size=20)
    with pytest.raises(DataError, match=r"row 77 \(plan=99"):
        predictor.predict(tmp_path / "bad.parquet", to=tmp_path / "new" / "other.parquet")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scores.parquet"]
    with pytest.raises(ValueError, match="to= is for a path"):
        predictor.predict(rows, to=to)


class Pair(nn.Module):
    """Gives what its arguments are."""

    def forward(self, x: Any, y: Any = None) -> Any:
        return {"x": x, "y": y}


def test_inputs_say_which_columns_are_which_arguments() -> None:
    rows = pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4], "x": [5.0, 6.0], "v": [[1.0, 2.0], [3.0, 4.0]]})

    def got(inputs: Any) -> dict[str, Any]:
        found = Predictor(Pair(), inputs=inputs, postprocess=_named("_")).predict(rows)
        return {name: np.stack(found[name].tolist()).tolist() for name in found if name.endswith("_")}

    assert got(None) == {"x_": [5, 6]}
    assert got("a") == {"x_": [1, 2]}
    assert got(["a", "b"]) == {"x_": [1, 2], "y_": [3, 4]}
    assert got([["a", "b"], "x"]) == {"x_": [[1, 3], [2, 4]], "y_": [5, 6]}
    assert got(["a", "b", "x"]) == {"x_": [[1, 3, 5], [2, 4, 6]]}  # more than forward has parameters
    assert got({"y": "a", "x": ["b", "v"]}) == {"x_": [[3, 1, 2], [4, 3, 4]], "y_": [1, 2]}


def _named(end: str) -> Any:
    return lambda output: {f"{name}{end}": value for name, value in output.items() if value is not None}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"inputs": ["plan", "usage", "agee"]}, "no column 'agee'; did you mean 'age'"),
        ({"inputs": ["plan", "usage"]}, "missing a required argument: 'age'"),
        ({"inputs": {"plan": "plan", "user": "age"}}, "does not fit the model, whose forward"),
        ({"inputs": ["text", "usage", "age"]}, "column 'text' has .*string.*StringIndexer"),
        ({"inputs": [["plan", 3]]}, "want the name of a column"),
        ({"outputs": "age"}, "there is a column 'age' already"),
        ({"outputs": {"score": "number"}}, "has the type 'number'; want one of boolean"),
        ({"nulls": "drop"}, "nulls is 'drop'"),
        ({"nulls": {"agee": 0}}, "nulls= names the column 'agee'"),
        ({"nulls": "null", "transform": len}, "needs inputs="),
        ({"key": "id"}, "key= names the column 'id'"),
        ({"transform": 3}, "transform= is a int; want a function"),
        ({"transform": len, "inputs": {"x": "age"}}, "inputs= is a list of names"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_a_wrong_setting_is_an_error_before_anything_is_scored(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Predictor(churn(), **settings).predict(table())


def test_columns_that_the_model_needs_and_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match=r"no column 'age' among 'customer', 'plan', 'usage', 'text'.*inputs="):
        Predictor(churn()).predict(table().drop(columns="age"))
    with pytest.raises(ValueError, match=r"cannot score a builtins.list.*TensorDataset"):
        Predictor(churn()).predict([1, 2])


@dataclass
class Output:
    """An output as detectors have it."""

    score: Any
    boxes: Any
    missing: Any = None


Both = namedtuple("Both", ["first", "second"])  # as programs write it


@pytest.mark.parametrize(
    ("made", "names", "wanted"),
    [
        (lambda x: x, None, {"prediction": pa.float32()}),
        (lambda x: x[:, None], None, {"prediction": pa.float32()}),
        (lambda x: x[:, None].expand(-1, 3), "scores", {"scores": pa.list_(pa.float32())}),
        (lambda x: x[:, None, None].expand(-1, 2, 3), None, {"prediction": pa.list_(pa.list_(pa.float32()))}),
        (lambda x: (x, x > 0), None, {"prediction_0": pa.float32(), "prediction_1": pa.bool_()}),
        (lambda x: (x, x.long()), ["a", "b"], {"a": pa.float32(), "b": pa.int64()}),
        (lambda x: {"p": x.double(), "q": x}, None, {"p": pa.float64(), "q": pa.float32()}),
        (lambda x: {"loss": x.sum(), "logits": x}, ["logits"], {"logits": pa.float32()}),
        (lambda x: Output(x, x.bfloat16()), None, {"score": pa.float32(), "boxes": pa.float32()}),
        (lambda x: Both(x.to(torch.uint8), x.half()), None, {"first": pa.int16(), "second": pa.float32()}),
        (lambda x: ["yes" if one > 1 else "no" for one in x.tolist()], None, {"prediction": pa.string()}),
        (lambda x: x.numpy(), None, {"prediction": pa.float32()}),
    ],
)
def test_outputs_become_columns(made: Any, names: Any, wanted: dict[str, Any]) -> None:
    x = np.arange(5, dtype=np.float32)
    found = Predictor(nn.Identity(), inputs=["x"], postprocess=made, outputs=names).predict(pa.table({"x": x}))
    assert {field.name: field.type for field in found.schema if field.name != "x"} == wanted
    assert found.num_rows == 5
    first = found.column(1).to_pylist()
    if wanted == {"prediction": pa.list_(pa.list_(pa.float32()))}:
        assert first == [[[value] * 3] * 2 for value in x.tolist()]
    if wanted == {"prediction": pa.string()}:
        assert first == ["no", "no", "yes", "yes", "yes"]


@pytest.mark.parametrize(
    ("made", "names", "why"),
    [
        (lambda x: x.sum(), None, r"has the shape \(\) for 5 rows"),
        (lambda x: {"loss": x.sum(), "logits": x}, None, r"output 'loss' has the shape \(\).*outputs="),
        (lambda x: (x, x), ["a"], "outputs= has 1 name, and the model returned 2 outputs"),
        (lambda x: {"p": x}, ["q"], "no output 'q', but 'p'"),
        (lambda x: x + 1j, None, "torch.complex64.*real"),
        (lambda x: {"p": object()}, None, "output 'p' is a object"),
        (lambda x: None, None, "output 'prediction' is a NoneType|returned nothing"),
    ],
)
def test_outputs_that_cannot_be_columns_say_why(made: Any, names: Any, why: str) -> None:
    predictor = Predictor(nn.Identity(), inputs=["x"], postprocess=made, outputs=names)
    with pytest.raises(DataError, match=why):
        predictor.predict(pa.table({"x": np.arange(5, dtype=np.float32)}))


def test_types_of_outputs_may_be_given_and_then_a_table_may_have_no_rows() -> None:
    rows = table()
    found = Predictor(churn(), outputs={"score": "double"}).predict(rows)
    assert found["score"].dtype == np.float64
    assert list(Predictor(churn(), outputs={"score": "double"}).predict(rows.head(0)).columns) == [*rows, "score"]
    with pytest.raises(ValueError, match=r"no rows that can be scored.*outputs="):
        Predictor(churn()).predict(rows.head(0))
    with pytest.raises(DataError, match="output 'score' is float, and was to be int32"):
        Predictor(churn(), outputs={"score": "int"}).predict(rows)


def test_nulls_are_counted_or_become_null_outputs_or_are_filled(tmp_path: Path) -> None:
    rows = table()
    rows.loc[[3, 20], "age"] = None
    pq.write_table(pa.Table.from_pandas(rows), tmp_path / "rows.parquet", row_group_size=10)
    with pytest.raises(DataError, match="column 'age' has 2 nulls in 50 rows, the first one in row 3; nulls= may be"):
        Predictor(churn()).predict(rows)
    with pytest.raises(DataError, match=r"column 'age' has 1 null in 10 rows"):
        Predictor(churn()).predict(tmp_path / "rows.parquet")
    model = churn()
    for data in (rows, tmp_path / "rows.parquet"):
        found = Predictor(model, nulls="null").predict(data)
        found = found if isinstance(found, pd.DataFrame) else found.to_pandas()
        assert found.index[found["prediction"].isna()].tolist() == [3, 20]
        wanted = scores(model, rows.dropna())
        np.testing.assert_allclose(found["prediction"].dropna(), wanted, rtol=1e-5, atol=1e-6)
    filled = Predictor(model, nulls={"age": 0.5}).predict(rows)["prediction"]
    np.testing.assert_allclose(filled, scores(model, rows.fillna({"age": 0.5})), rtol=1e-5, atol=1e-6)


def test_rows_that_are_all_null_have_null_outputs_once_the_types_are_known() -> None:
    rows = table(3).assign(age=[None, None, None]).astype({"age": float})
    with pytest.raises(ValueError, match="no rows that can be scored"):
        Predictor(churn(), nulls="null").predict(rows)
    found = Predictor(churn(), nulls="null", outputs={"score": "float"}).predict(rows)
    assert found["score"].isna().all()


@pytest.mark.parametrize("bad", [0, 9, 41])
def test_a_row_for_which_the_model_fails_is_named(bad: int) -> None:
    rows = table()
    rows.loc[bad, "plan"] = 99
    with pytest.raises(DataError, match=rf"row {bad} \(plan=99, usage=.*IndexError: index out of range") as raised:
        Predictor(churn(), batch_size=16).predict(rows)
    assert isinstance(raised.value.__cause__, IndexError)
    with pytest.raises(DataError, match=rf"row {bad} \(customer={1000 + bad}\): IndexError"):
        Predictor(churn(), key="customer").predict(rows)


def test_a_batch_that_fails_only_together_is_named() -> None:
    def refuse(output: Any) -> Any:
        if len(output) > 1:
            raise RuntimeError("too many")
        return output

    rows = pa.table({"x": np.arange(6, dtype=np.float32)})
    with pytest.raises(DataError, match=r"from row 0 \(x=0.0\) to row 5 \(x=5.0\), and for none of its rows alone"):
        Predictor(nn.Identity(), inputs=["x"], postprocess=refuse).predict(rows)


def test_a_transform_makes_the_arguments_of_pictures_and_texts() -> None:
    pictures = np.random.default_rng(0).integers(0, 255, (6, 3, 4, 4), dtype=np.uint8)
    rows = pa.table(
        {
            "flat": pa.array(pictures.reshape(6, -1).tolist(), pa.list_(pa.uint8())),
            "raw": [picture.tobytes() for picture in pictures],
            "words": [[1], [2, 3], [], [4], [5], [6, 7, 8]],
            "other": [None] * 6,
        }
    )
    wanted = [float(picture.mean()) for picture in pictures.astype(np.float32)]

    def of_flat(batch: Any) -> Any:
        return batch["flat"].view(-1, 3, 4, 4).float()

    def of_bytes(batch: Any) -> Any:
        cells = [np.frombuffer(cell, np.uint8).reshape(3, 4, 4) for cell in batch["raw"]]
        return (torch.from_numpy(np.stack(cells)).float(),)

    def of_words(batch: Any) -> Any:
        return {"input": torch.nn.utils.rnn.pad_sequence(batch["words"], batch_first=True)}

    def mean(output: Any) -> Any:
        return output.float().mean((1, 2, 3))

    for transform in (of_flat, of_bytes):
        found = Predictor(nn.Identity(), transform=transform, postprocess=mean).predict(rows)
        np.testing.assert_allclose(found["prediction"].to_pylist(), wanted, rtol=1e-6)
    padded = Predictor(nn.Identity(), transform=of_words).predict(rows)["prediction"].to_pylist()
    assert padded[1] == [2, 3, 0]
    with pytest.raises(DataError, match="a list of 2 where others have 1; give nulls= or make lists of one length, or"):
        Predictor(nn.Identity(), inputs="words").predict(rows)
    with pytest.raises(DataError, match=r"the model fails for row 0 .*KeyError: .*'flat', 'raw', 'words', 'other'"):
        Predictor(nn.Identity(), transform=lambda batch: batch["pictures"]).predict(rows)


def test_a_pandas_column_of_arrays_with_dimensions_is_a_tensor() -> None:
    cells = list(np.arange(24, dtype=np.float32).reshape(4, 2, 3))
    found = Predictor(nn.Flatten(), inputs="x").predict(pd.DataFrame({"x": cells}))
    assert [cell.tolist() for cell in found["prediction"]] == [cell.reshape(-1).tolist() for cell in cells]


def test_floats_get_the_type_of_the_models_parameters() -> None:
    rows = table()
    half = churn().to(torch.bfloat16)
    assert Predictor(half).predict(rows)["prediction"].dtype == np.float32
    double = churn().double()
    assert Predictor(double).predict(rows)["prediction"].dtype == np.float64


class Items(Dataset[Any]):
    """Dicts of a data set without columns."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"plan": 99 if index == self.bad else index, "usage": 0.5, "age": index / 10, "label": 1}


def test_the_items_of_a_data_set_get_outputs_beside_them() -> None:
    x, model = torch.randn(600, 4), nn.Linear(4, 3)
    found = Predictor(model).predict(TensorDataset(x, torch.arange(600)))
    assert isinstance(found, StackDataset)
    assert len(found) == 600
    assert torch.equal(found[599]["input"][0], x[599])
    torch.testing.assert_close(torch.stack([found[index]["prediction"] for index in range(600)]), model(x).detach())
    dicts = Predictor(churn(), batch_size=4, outputs="score").predict(Items())
    rows = pd.DataFrame([Items()[index] for index in range(10)])
    np.testing.assert_allclose(
        [dicts[index]["score"] for index in range(10)], scores(churn(), rows), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(DataError, match="the model fails for item 7: IndexError"):
        Predictor(churn(), batch_size=4).predict(Items(bad=7))
