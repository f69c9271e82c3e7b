"""A saved model gives the outputs in MLflow, in a process that has neither lagom nor the user's modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
import torch
from torch import nn

from lagom import Predictor, Result
from tests.extensions.scoring.models import churn, table

pytest.importorskip("mlflow.pyfunc")

_LOAD = """
import json, sys

class Refuse:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("lagom", "tests"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
print(json.dumps(model.predict(pandas.read_pickle(sys.argv[2])).to_dict("list")))
"""


def test_a_saved_model_needs_no_lagom(tmp_path: Path) -> None:
    def both(output: Any) -> dict[str, Any]:
        return {"score": torch.sigmoid(output[:, 0]), "label": ["high" if one > 0 else "low" for one in output[:, 0]]}

    model, rows = churn(), table()
    result = Result(model, [model], seconds=1.0)
    result.save_mlflow(tmp_path / "model", example=rows, postprocess=both)
    rows.drop(columns="text").to_pickle(tmp_path / "rows.pkl")
    command = [sys.executable, "-W", "ignore", "-c", _LOAD, str(tmp_path / "model"), str(tmp_path / "rows.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = Predictor(model, postprocess=both).predict(rows)
    assert list(found) == ["score", "label"]
    np.testing.assert_allclose(found["score"], wanted["score"], rtol=1e-6)
    assert found["label"] == wanted["label"].tolist()


def test_the_signature_has_the_columns_of_the_model_and_its_outputs(tmp_path: Path) -> None:
    from mlflow.models import get_model_info

    Predictor(churn()).save_mlflow(tmp_path / "model", example=pa.Table.from_pandas(table()))
    signature = get_model_info(str(tmp_path / "model")).signature
    assert signature.inputs.input_names() == ["plan", "usage", "age"]
    assert [str(kind) for kind in signature.outputs.input_types()] == ["DataType.float"]
    pictures = pd.DataFrame({"x": list(np.ones((3, 2, 2), np.float32))})
    Predictor(nn.Flatten()).save_mlflow(tmp_path / "pictures", example=pictures.rename(columns={"x": "input"}))
    assert "Array(Array(float))" in str(get_model_info(str(tmp_path / "pictures")).signature.inputs)


def test_a_model_that_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give path=.* or name="):
        Predictor(churn()).save_mlflow(example=table())
    with pytest.raises(ValueError, match=r"example is a builtins.list"):
        Predictor(churn()).save_mlflow(tmp_path / "model", example=[1])
