"""Snapshots of two hosts that share neither files nor processes nor addresses with the driver's."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder, SnapshotPlace
from tests.extensions.resume import training
from tests.extensions.resume.kills import killed
from tests.integration import hosts

pytestmark = pytest.mark.parametrize("spark", ["foreign", "foreign-encrypted"], indirect=True, scope="session")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that come back are put where the driver stands."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
def test_hosts_that_do_not_see_the_runs_folder_send_snapshots_to_the_driver_and_fetch_them(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connections: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    def train(train_set: Any, folder: str) -> list[list[float]]:
        model = training.Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            for step, (x, y, _) in enumerate(DataLoader(training.Noisy(train_set), batch_size=4, shuffle=True)):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if number == 1:
                    training.pause(folder, 0.3 * 2**step)
            print(f"epoch {number}")
        return [one.tolist() for one in model.state_dict().values()]

    unseen = SnapshotFolder("/nowhere/snapshots")
    monkeypatch.setattr(
        RunHistory, "snapshots", property(lambda run: run.folder and SnapshotPlace(unseen, run.resumed))
    )
    wanted = experiment.lagom(train, training.config(tmp_path / "whole", world_size=3)).value
    (tmp_path / "slowly").touch()
    with killed(tmp_path, 2, pid_of=hosts.seen_from_here):
        settings: Any = {"launcher": "spark", "world_size": 3, "snapshot_every_s": 0.1}
        result = experiment.lagom(train, training.config(tmp_path, **settings))
    for one, other in zip(result.value, wanted, strict=True):
        torch.testing.assert_close(*(torch.tensor(x, dtype=torch.float64) for x in (one, other)), rtol=0, atol=1e-12)
    assert "of epoch 2" in result.failures[0]["resumed_from"]
    assert "deliver snapshot-1" in connections
    assert connections.count("fetch") == 2  # by each host, after the loss
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("epoch")][3:] == [
        f"epoch {number}" for number in range(3)
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
def test_no_snapshot_is_taken_while_files_are_on_the_disk_of_one_host(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> int:
        with open("log.txt", "a") as log:
            print("begun", file=log)
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2):
            torch.nn.Linear(1, 1)(x).mean().backward()
            time.sleep(0.2)
        return 1

    settings: Any = {"launcher": "spark", "world_size": 3, "snapshot_every_s": 0.1, "run_dir": tmp_path / "runs"}
    assert experiment.lagom(train, TorchDistributedConfig(**settings)).value == 1
    told = "the program has written log.txt to the working directory of an executor, which only that host sees"
    assert told in capfd.readouterr().err
    assert (tmp_path / "log.txt").read_text() == "begun\n"
