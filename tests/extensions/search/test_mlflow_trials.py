"""Trials in MLflow: each is a run below that of the search, and an unmodified program logs to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from tests.extensions.search.mlflow_searches import check_runs_below_the_active_one, runs, search, store
from tests.imported_once import forked_server
from tests.late_modules import mlflow


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> Iterator[None]:
    """Has trials find MLflow imported, which would take each of them three seconds, and as the import left it."""
    mlflow.imported()
    with pytest.MonkeyPatch.context() as changed:
        # What a test before these has given to set_tracking_uri comes before the variable.
        changed.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
        with forked_server():
            yield


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path) -> Iterator[None]:
    with store(tmp_path):
        yield


def test_each_trial_is_a_run_below_the_active_one() -> None:
    check_runs_below_the_active_one("local")


def test_an_experiment_that_is_set_gets_a_run_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow.create_experiment("set")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "set")
    search(name="the search", num_trials=1)
    found = runs("set")
    assert found["the search"].info.status == "FINISHED"
    (below,) = [run for run in found.values() if run.data.tags.get("mlflow.parentRunId")]
    assert below.data.tags["mlflow.parentRunId"] == found["the search"].info.run_id
    assert mlflow.active_run() is None


def test_an_inline_trial_starts_a_run_as_in_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(x: float) -> float:
        with mlflow.start_run(run_name=f"my {x:g}"):
            mlflow.log_metric("loss", x)
        return x

    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", mlflow.create_experiment("set"))
    space = Searchspace(x=("DISCRETE", [1.0, 2.0]))
    config = HyperparameterOptConfig(
        searchspace=space,
        optimizer="grid",
        direction="min",
        optimization_key="loss",
        launcher="inline",
        name="the search",
        run_dir=None,
    )
    result = experiment.lagom(train, config)
    assert [trial["state"] for trial in result.trials] == ["complete"] * 2
    found = runs("set")
    assert found.keys() == {"the search", "trial 0", "trial 1", "my 1", "my 2"}
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert found["my 2"].data.metrics == {"loss": 2.0}
    assert found["trial 1"].data.tags["mlflow.parentRunId"] == found["the search"].info.run_id
    assert mlflow.active_run() is None


def test_without_a_run_in_the_caller_programs_log_to_the_real_store() -> None:
    (trial,) = search(num_trials=1).trials
    kind = trial["params"]["kind"]
    found = runs("elsewhere" if kind == "elsewhere" else "Default")
    assert found.keys() <= {f"my {kind}", "second"}
    assert found[f"my {kind}"].data.params == {"kind": f"a {kind} one"}
    assert not any(run.data.tags.get("mlflow.parentRunId") for run in found.values())


def test_a_server_that_does_not_answer_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run():
        monkeypatch.setattr(mlflow.MlflowClient, "create_run", _fail)
        result = search(num_trials=2)
    assert len(result.trials) == 2
    assert caplog.text.count("MLflow has not all that was to be logged of this search: OSError: gone") == 1


def _fail(*_: Any, **__: Any) -> Any:
    raise OSError("gone")
