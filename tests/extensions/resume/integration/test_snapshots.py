"""Runs on Spark that lose a rank go on from their last snapshot, or begin again."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lagom import experiment
from lagom.cli import main
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder, SnapshotPlace
from tests.driver import losses
from tests.extensions.resume import training
from tests.extensions.resume.kills import kill_driver, killed, wait_for_snapshot
from tests.extensions.resume.test_resume import close, same
from tests.extensions.resume.training import config, train
from tests.integration.test_attempts import executor_of
from tests.programs.expectations import CASES
from tests.programs.kills import UNPROTECTED, judge_kill


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
@pytest.mark.parametrize(
    ("spark", "sees"),
    [
        ("local[2]", False),
        # tests/extensions/resume shows it by default on this machine
        pytest.param("local[2]", True, marks=pytest.mark.soak),
        ("standalone", True),
    ],
    indirect=["spark"],
    scope="session",
)
def test_a_run_goes_on_from_its_snapshot_when_a_rank_is_killed(
    spark: Any, sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Args:
        sees: whether the ranks' hosts see the run's folder, or send snapshots to the driver.
    """
    if not sees:
        hide_folder(monkeypatch)
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
    wanted = experiment.lagom(train, config(tmp_path / "whole", launcher="spark", world_size=2)).value
    folder = tmp_path / "lost"
    (folder / "slowly").touch()
    with killed(folder, 1):
        result = experiment.lagom(train, config(folder, launcher="spark", world_size=2, snapshot_every_s=0.1))
    assert same(result.value, wanted)
    assert (folder / "rows.csv").read_text() == (tmp_path / "whole" / "rows.csv").read_text()
    assert "of epoch 2" in result.failures[0]["resumed_from"]


@pytest.mark.soak  # tests/extensions/resume/test_resume.py shows it by default, with slots of a test
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
@pytest.mark.parametrize("spark", ["standalone"], indirect=True, scope="session")
def test_a_run_that_loses_an_executor_goes_on_at_once_and_later_with_the_new_one(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole").mkdir()
    wanted = experiment.lagom(train, config(tmp_path / "whole", launcher="spark", world_size=2)).value
    (tmp_path / "slowly").touch()

    def kill() -> None:
        wait_for_snapshot(tmp_path)
        os.kill(executor_of(losses.ranks(tmp_path / "runs")["1"]["pid"]), signal.SIGKILL)
        (tmp_path / "slowly").write_text("6.0")
        try:
            losses.wait_for(lambda: "there is room for more ranks" in messages(tmp_path))
        finally:
            (tmp_path / "slowly").unlink()

    thread = threading.Thread(target=kill)
    thread.start()
    result = experiment.lagom(train, config(tmp_path, launcher="spark", world_size=2, snapshot_every_s=0.1))
    thread.join()
    assert len(result.per_rank) == 2
    assert close(result.value, wanted)
    assert (tmp_path / "rows.csv").read_text() == (tmp_path / "whole" / "rows.csv").read_text()
    assert len(result.failures) == 1
    said = capfd.readouterr().err
    assert "attempt 2 of 4, with 1 rank instead of 2" in said
    assert "of epoch 2, with 2 ranks\n" in said


@pytest.mark.soak  # tests/extensions/resume/test_resume.py resumes on this machine by default
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
@pytest.mark.parametrize("spark", ["local[2]", "standalone"], indirect=True, scope="session")
def test_a_run_whose_driver_was_killed_goes_on_on_spark(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # the command sets it, for its own process
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
    wanted = experiment.lagom(train, config(tmp_path / "whole", world_size=2)).value
    program = Path(training.__file__)
    env = os.environ | {"PYTHONPATH": str(program.parents[3])}
    kill_driver([sys.executable, str(program), str(tmp_path / "lost")], tmp_path / "lost", env)
    (run,) = (tmp_path / "lost" / "runs").iterdir()
    assert main(["resume", str(run), "--master", spark.sparkContext.master]) == 0
    result = experiment.resume(run)
    assert same(result.value, wanted)
    assert (tmp_path / "lost" / "rows.csv").read_text() == (tmp_path / "whole" / "rows.csv").read_text()
    assert "Spark" in json.loads((run / "run.json").read_text())["where"]


def messages(folder: Path) -> str:
    """Return what lagom has said about the run in ``folder``."""
    return "".join(path.read_text() for path in folder.glob("runs/*/lagom.log"))


def hide_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks look for the run's folder where it is not."""
    unseen = SnapshotFolder("/nowhere/snapshots")
    there = property(lambda run: run.folder and SnapshotPlace(unseen, run.resumed))
    monkeypatch.setattr(RunHistory, "snapshots", there)


@pytest.mark.soak
@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_what_mlflow_is_told_is_kept_in_a_folder_that_hosts_see(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")

    def train(train_set: Any, store: str) -> int:
        import mlflow

        mlflow.set_tracking_uri(store)
        with mlflow.start_run():
            for x, _ in DataLoader(train_set, batch_size=8):
                torch.nn.Linear(3, 1).double()(x).mean().backward()
                mlflow.log_metric("loss", 1.0)
                time.sleep(0.1)
        return 1

    hide_folder(monkeypatch)
    hparams = {"store": f"sqlite:///{tmp_path}/mlflow.db"}
    settings: Any = {"launcher": "spark", "world_size": 2, "snapshot_every_s": 0.1, "hparams": hparams}
    assert experiment.lagom(train, config(tmp_path, **settings)).value == 1
    assert "only a run_dir that all hosts share can keep what it has told" in capfd.readouterr().err


@pytest.mark.soak  # above, and on this machine in tests/programs/test_kills.py and tests/driver/test_attempts.py
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
@pytest.mark.parametrize("spark", ["local[4]"], indirect=True, scope="session")
@pytest.mark.parametrize("way", ["restarts", "snapshots"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(10))
def test_a_program_that_loses_a_rank_gives_what_it_gives_without(
    seed: int, world_size: int, way: str, spark: Any, record_property: Any
) -> None:
    draw = random.Random(f"{way} {world_size} {seed}")
    case = draw.choice([case for case in CASES if str(case) not in UNPROTECTED[way]])
    where: dict[str, Any] = {"world_size": world_size, "launcher": "spark"}
    record_property("resumed_from", judge_kill(case, way, draw, by_rows=seed % 2 == 1, **where))
