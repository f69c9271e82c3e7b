"""Changes that a program has made to its process and to files are there when it goes on from a snapshot."""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from tests.extensions.resume.kills import killed
from tests.extensions.resume.training import config, newest

PATIENCE_S = 60.0
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")


def train(train_set: Any, folder: str) -> list[Any]:
    """Handle signals, register an exit function, and write a file when told to; read it from then on."""
    handled, read = list[int](), list[str]()
    signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    atexit.register(append, f"{folder}/ends.txt")
    num_batches = 0
    for _ in DataLoader(TensorDataset(torch.arange(20)), batch_size=1):
        num_batches += 1
        if os.path.exists(f"{folder}/late.txt"):
            read.append(Path(f"{folder}/late.txt").read_text())
        elif os.path.exists(f"{folder}/write"):
            Path(f"{folder}/late.txt").write_text("written")
            time.sleep(PATIENCE_S)  # until it is killed
        time.sleep(0.1)
    signal.raise_signal(signal.SIGUSR2)
    return [num_batches, handled, set(read)]


def append(path: str) -> None:
    with open(path, "a") as file:
        file.write("end\n")


def test_handlers_exit_functions_and_files_saved_after_the_snapshot_are_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill() -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not (tmp_path / "late.txt").exists():
            for path in tmp_path.glob("runs/*/run.json"):
                facts = json.loads(path.read_text())
                if facts.get("snapshots"):
                    (tmp_path / "write").touch()
            time.sleep(0.01)
        os.kill(facts["ranks"]["1"]["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    result = experiment.lagom(train, config(tmp_path, world_size=2, snapshot_every_s=0.1))
    thread.join()
    assert "batch" in result.failures[0]["resumed_from"]
    assert result.value == [20, [signal.SIGUSR2], {"written"}]
    assert (tmp_path / "ends.txt").read_text() == "end\n"
    assert "late.txt is as the lost attempt wrote it after the snapshot" in capfd.readouterr().err


def forkless(train_set: Any) -> int:
    """Train where the system gives no process for a snapshot."""

    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = fork
    num_batches = 0
    for _ in DataLoader(TensorDataset(torch.arange(10)), batch_size=1):
        num_batches += 1
        time.sleep(0.05)
    return num_batches


def test_a_run_that_cannot_fork_goes_on_without_snapshots_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = experiment.lagom(forkless, config(tmp_path, world_size=2, snapshot_every_s=0.05))
    assert result.value == 10
    assert "the process could not be forked: [Errno 11]" in capfd.readouterr().err


def tidies(train_set: Any, folder: str) -> list[Any]:
    """Rename, replace and remove files behind the last batch, then wait to be killed; read what is there."""
    for name in ("table.csv", "old.txt", "best.txt", "latest.txt"):
        Path(f"{folder}/{name}").write_text(f"{name}\n")
    os.mkdir(f"{folder}/part")
    for (number,) in DataLoader(TensorDataset(torch.arange(15)), batch_size=1):
        with open(f"{folder}/table.csv", "a") as table:
            table.write(f"{number.item()}\n")
        time.sleep(0.1)
    os.rename(f"{folder}/table.csv", f"{folder}/final.csv")
    os.replace(f"{folder}/latest.txt", f"{folder}/best.txt")
    os.remove(f"{folder}/old.txt")
    os.rmdir(f"{folder}/part")
    Path(f"{folder}/tidy.txt").write_text("yes")
    while os.path.exists(f"{folder}/slowly"):
        time.sleep(0.01)
    with pytest.raises(FileNotFoundError):
        os.remove(f"{folder}/old.txt")
    return [Path(f"{folder}/{name}").read_text() for name in ("final.csv", "best.txt")]


@pytest.mark.soak  # tests/disk/test_attempt_calls.py shows it by default, of the functions
def test_files_that_were_renamed_and_removed_after_the_snapshot_are_so_once_more(tmp_path: Path) -> None:
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
    wanted = experiment.lagom(tidies, config(tmp_path / "whole", world_size=2)).value
    folder = tmp_path / "lost"
    (folder / "slowly").touch()
    with killed(folder, 1, wait_until_tidy):
        result = experiment.lagom(tidies, config(folder, world_size=2, snapshot_every_s=0.1))
    assert "batch" in result.failures[0]["resumed_from"]
    assert result.value == wanted
    names = [
        sorted(path.name for path in (tmp_path / name).iterdir() if path.name != "runs") for name in ("whole", "lost")
    ]
    assert names[0] == names[1] == ["best.txt", "final.csv", "tidy.txt"]


def wait_until_tidy(folder: Path) -> None:
    """Wait until the program has tidied up; by then there is a snapshot."""
    end = time.monotonic() + PATIENCE_S
    while not (folder / "tidy.txt").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert newest(folder)
