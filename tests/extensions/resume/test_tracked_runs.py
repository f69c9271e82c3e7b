"""MLflow's runs go on: a run that is killed has logged all values once, in runs that are there once.

By default observe/tracking/test_call_journal.py and test_mlflow.py show it of the calls, without a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from tests.extensions.resume import recorders
from tests.extensions.resume.kills import kill_driver, killed, wait_until_late
from tests.extensions.resume.recorders import to_mlflow
from tests.extensions.resume.training import config
from tests.late_modules import mlflow
from tests.ranks import alone

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code"),
]
FILES, DATABASE = "file:{folder}/mlruns", "sqlite:///{folder}/runs.db"


@pytest.fixture(autouse=True)
def _plain_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow.imported()
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")


def settings(folder: Path, kind: str, **more: Any) -> Any:
    return config(folder, hparams={"folder": str(folder), "store": kind.format(folder=folder)}, **more)


def kept(folder: Path, kind: str) -> Any:
    """Return the ids of all runs; and what the store holds of them, but for times."""

    def read(_: Any) -> Any:
        client = mlflow.MlflowClient(kind.format(folder=folder))
        (one,) = client.search_experiments(filter_string="name = 'bridges'")
        runs = sorted(client.search_runs([one.experiment_id]), key=lambda run: str(run.info.run_name))
        return [run.info.run_id for run in runs], [
            {
                "name": (run.info.run_name, run.info.status),
                "params": run.data.params,
                "tags": {key: run.data.tags.get(key) for key in ("kind", "epoch")},
                "metrics": {
                    key: sorted((m.step, repr(m.value)) for m in client.get_metric_history(run.info.run_id, key))
                    for key in run.data.metrics
                },
                "files": [file.path for file in client.list_artifacts(run.info.run_id)],
            }
            for run in runs
        ]

    return alone(read)


def wanted(value: tuple[Sequence[str], Sequence[float]]) -> Any:
    """Return what a run has logged that returns ``value``."""
    (outer, inner), losses = value
    assert len(losses) == 30
    return [inner, outer], [
        {
            "name": ("inner", "FINISHED"),
            "params": {},
            "tags": {"kind": None, "epoch": None},
            "metrics": {"a": [(7, "6.0")], "b": [(7, "nan")]},
            "files": ["at.json"],
        },
        {
            "name": ("outer", "FINISHED"),
            "params": {"lr": "0.1", "depth": "3", "late": "6"},
            "tags": {"kind": "test", "epoch": "2"},
            "metrics": {
                "loss": [(step, repr(loss)) for step, loss in enumerate(losses)],
                "place": [(at, repr(float(at))) for at in range(10) for _ in range(3)],
            },
            "files": ["notes"],
        },
    ]


@pytest.mark.parametrize(
    ("rank", "world_size", "kind"),
    [(0, 1, FILES), (0, 2, DATABASE), (1, 2, FILES), (2, 3, FILES)],
)
def test_a_run_goes_on_when_a_rank_is_killed(
    rank: int, world_size: int, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slowly").touch()
    with killed(tmp_path, rank, wait_until_late):
        result = experiment.lagom(to_mlflow, settings(tmp_path, kind, world_size=world_size, snapshot_every_s=0.1))
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    assert kept(tmp_path, kind) == wanted(result.value)
    assert "something else" not in capfd.readouterr().err


@pytest.mark.parametrize(("world_size", "kind"), [(2, DATABASE), (3, FILES)])
def test_a_run_goes_on_in_another_process(world_size: int, kind: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, recorders.__file__, str(tmp_path), "to_mlflow", kind.format(folder=tmp_path)]
    kill_driver(command, tmp_path, env, wait_until_late)
    (run,) = (tmp_path / "runs").iterdir()
    result = experiment.resume(run, world_size=world_size)
    assert kept(tmp_path, kind) == wanted(result.value)
