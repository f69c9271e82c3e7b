"""A program that logs to MLflow, searched over, and the runs that its trials have then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from tests.extensions.search.odd_trials import Prunes
from tests.late_modules import mlflow


@contextmanager
def store(folder: Path) -> Iterator[None]:
    """Let MLflow keep its runs in files of ``folder``, which is the working directory meanwhile."""
    with pytest.MonkeyPatch.context() as changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.imported()
        for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
            changed.delenv(name, raising=False)
        # MLflow keeps what another test has given to set_tracking_uri, and then does not look at the variable.
        changed.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
        changed.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        changed.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        changed.setenv("MLFLOW_TRACKING_URI", f"file:{folder}/mlruns")
        changed.setenv("GIT_PYTHON_REFRESH", "quiet")
        changed.chdir(folder)
        yield


def train(kind: str) -> float:
    """Log to MLflow as programs do that know of no search."""
    import mlflow

    if kind == "elsewhere":
        mlflow.set_experiment("elsewhere")
    with mlflow.start_run(run_name=f"my {kind}"):
        mlflow.log_param("kind", f"a {kind} one")
        for step in range(3):
            mlflow.log_metric("loss", 9.0 if kind == "pruned" else 1.0 / (step + 1), step=step)
        Path("note.txt").write_text(kind)
        mlflow.log_artifact("note.txt")
    with mlflow.start_run(run_name="second"):
        pass
    if kind == "failing":
        raise ValueError("out of luck")
    return 0.125


def search(launcher: Any = "local", **settings: Any) -> Any:
    """Search over all kinds of programs."""
    kinds = ["plain", "elsewhere", "failing", "pruned"]
    config = HyperparameterOptConfig(
        searchspace=Searchspace(kind=("CATEGORICAL", kinds)),
        optimizer="grid",
        direction="min",
        optimization_key="loss",
        es_policy=Prunes(),
        launcher=launcher,
        num_slots=2,
        run_dir="runs",
        **settings,
    )
    return experiment.lagom(train, config)


def runs(experiment_name: str) -> dict[str, Any]:
    """All runs of an experiment by name."""
    found = mlflow.search_runs(experiment_names=[experiment_name], output_format="list")
    return {run.info.run_name: run for run in found}


def check_runs_below_the_active_one(launcher: Any) -> None:
    """Search below an active run, and check each trial's run."""
    with mlflow.start_run(run_name="of mine", experiment_id=mlflow.create_experiment("mine")) as parent:
        result = search(launcher)
        active = mlflow.active_run()
        assert active is not None
        assert active.info.run_id == parent.info.run_id
    trials = {each["params"]["kind"]: each for each in result.trials}
    found = runs("mine")
    below = {name: run for name, run in found.items() if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    status = {name: run.info.status for name, run in below.items()}
    not_named = f"trial {trials['elsewhere']['number']}"
    assert status == {"my plain": "FINISHED", "my failing": "FAILED", "my pruned": "KILLED", not_named: "FINISHED"}
    plain = below["my plain"]
    assert plain.data.params == {"kind": "a plain one"}
    history = mlflow.MlflowClient().get_metric_history(plain.info.run_id, "loss")
    assert [one.value for one in history] == [1.0, 0.5, 1 / 3, 0.125]
    assert plain.data.metrics == {"loss": 0.125}
    assert [file.path for file in mlflow.MlflowClient().list_artifacts(plain.info.run_id)] == ["note.txt"]
    assert below["my failing"].data.tags["error"] == "ValueError: out of luck"
    assert below[not_named].data.params == {"kind": "elsewhere"}
    assert runs("elsewhere")["my elsewhere"].data.params == {"kind": "a elsewhere one"}
    assert "second" in found
    kept = {str(path.relative_to(each["folder"])) for each in result.trials for path in each["folder"].rglob("*")}
    assert kept - {"output.txt"} == {"files", "files/note.txt"}  # and nothing of the store
