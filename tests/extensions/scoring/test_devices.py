"""Scoring on the test device: the outputs of the CPU, also on an executor, and where the driver alone has a device."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from lagom import Predictor
from lagom.extensions.scoring import by_value, executor_scoring
from tests.accelerator.device_processes import needs_device, with_device
from tests.extensions.scoring.models import churn, scores, table


class Place(nn.Module):
    """Gives the number of the test device on which it runs; -1 for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, age: torch.Tensor) -> Any:
        number = age.device.index if age.device.type == self.net.weight.device.type == "lagomtest" else -1
        return self.net(age[:, None]) * 0 + number


@needs_device
@with_device(2)
def test_a_model_scores_on_the_device() -> None:
    model, rows = churn(), table()
    np.testing.assert_allclose(Predictor(model).predict(rows)["prediction"], scores(model, rows), rtol=1e-5, atol=1e-6)
    assert set(Predictor(Place()).predict(rows)["prediction"]) == {0}


@needs_device
@pytest.mark.parametrize(
    ("addresses", "partition", "wanted"),
    [(["1"], 0, 1), (["0"], 1, 0), (None, 1, 1), (None, 2, 0)],
)
@with_device(2)
def test_a_task_of_spark_scores_on_the_device_that_it_was_given(
    addresses: list[str] | None, partition: int, wanted: int
) -> None:
    """Without one, on the device of the partition's number."""
    from pyspark import TaskContext

    resources = {} if addresses is None else {"gpu": types.SimpleNamespace(addresses=addresses)}
    context = types.SimpleNamespace(resources=lambda: resources, partitionId=lambda: partition)
    score = executor_scoring.column_scoring(pickled(), f"{addresses} {partition}", ["age"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskContext, "get", lambda: context)
        (found,) = score(iter([pa.array([1.0, 2.0], pa.float32())]))
    assert found.to_pylist() == [wanted, wanted]


@needs_device
@with_device(2)
def test_a_driver_with_a_device_sends_the_model_to_executors_without_one(tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(pickled())
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    text = f"""
import pickle, pyarrow as pa
scorer = pickle.load(open({str(tmp_path / "payload")!r}, "rb"))
batch = pa.RecordBatch.from_arrays([pa.array([1.0, 2.0], pa.float32())], names=["age"])
print(scorer.score(batch, 0, "")[0].to_pylist())
"""
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout == "[-1.0, -1.0]\n", run.stderr


def pickled() -> bytes:
    """A scorer as the driver sends it, which has tried the first rows on its own device."""
    import cloudpickle

    rows = pa.Table.from_pydict({"age": pa.array([1.0, 2.0, 3.0], pa.float32())})
    scorer = Predictor(Place()).scorer(rows.column_names, lambda *_: rows)
    assert scorer.model.net.weight.device.type == "lagomtest"
    return by_value.pickled_scorer(scorer, cloudpickle)
