"""SIGTERM to ``lagom run``: a snapshot at the next batch, status 143, and a line that says how the run continues."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration import clusters

PROGRAM = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

folder = sys.argv[1]
torch.manual_seed(3)
x = torch.rand(96, 4, generator=torch.Generator().manual_seed(1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
batches = open(f"{folder}/batches.csv", "a")
for epoch in range(3):
    for batch, (rows,) in enumerate(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        print(epoch, batch, loss.item().hex(), file=batches, flush=True)
        time.sleep(0.05)
print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""
NUM_BATCHES = 3 * 24
_PATIENCE_S = 300.0


def lagom(*words: str) -> subprocess.Popen[str]:
    """Start a command of lagom."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lagom", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def start(folder: Path, *options: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    """Start the program, with records in ``folder``."""
    folder.mkdir()
    (folder / "train.py").write_text(program)
    place = ["--run-dir", str(folder / "runs"), str(folder / "train.py"), str(folder)]
    return lagom("run", "-n", "2", *options, *place)


def lines(folder: Path) -> Sequence[str]:
    """Return the batches that the program has noted."""
    path = folder / "batches.csv"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(number: int, folder: Path, process: subprocess.Popen[str]) -> int:
    """Wait until the program has noted ``number`` batches; return how many it has noted."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := len(lines(folder))) < number:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Sequence[str]]:
    """What the program prints last, and its batches, when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start(folder, "--snapshot-every", "1000")
    output = process.communicate(timeout=_PATIENCE_S)[0]
    assert process.returncode == 0
    assert len(lines(folder)) == NUM_BATCHES
    return output.splitlines()[-1], lines(folder)


MOMENTS = [*random.Random(5).sample(range(1, NUM_BATCHES - 6), 20)]


CASES = [pytest.param(moment, "local", marks=[pytest.mark.soak] * (place >= 3)) for place, moment in enumerate(MOMENTS)]
CASES += [pytest.param(20, "spark", marks=[pytest.mark.soak, pytest.mark.integration, pytest.mark.timeout(900)])]


@pytest.mark.parametrize(("moment", "master"), CASES)
def test_a_run_that_is_ended_by_sigterm_continues_from_the_next_batch(
    undisturbed: tuple[str, Sequence[str]], tmp_path: Path, moment: int, master: str
) -> None:
    if master == "spark" and not clusters.java():
        pytest.skip("no Java here")
    folder = tmp_path / "run"
    process = start(folder, "--snapshot-every", "1000", "--master", master)
    noted = wait_for(moment, folder, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    (run,) = (folder / "runs").iterdir()
    found = re.search(rf"ended by SIGTERM; lagom resume {run} continues from batch (\d+) of epoch (\d+)\n", errors)
    assert found is not None, errors
    assert 24 * (int(found[2]) - 1) + int(found[1]) >= noted  # nothing is computed again that came before the signal
    resumed = lagom("resume", "--master", master, str(run))
    output, errors = resumed.communicate(timeout=_PATIENCE_S)
    assert resumed.returncode == 0, errors
    assert (output.splitlines()[-1], lines(folder)) == undisturbed


def test_the_last_snapshot_does_not_wait_for_the_end_of_the_next_batch(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    slow = PROGRAM.replace("time.sleep(0.05)", f"time.sleep(3 if batch == 0 else {_PATIENCE_S})")
    process = start(folder, "--snapshot-every", "1000", program=slow)
    wait_for(1, folder, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    (run,) = (folder / "runs").iterdir()
    assert f"lagom resume {run} continues from batch 2 of epoch 1" in errors
    assert json.loads((run / "run.json").read_text())["snapshots"]["place"] == [1, 1]  # the driver has been told


def test_without_snapshots_the_run_ends_with_the_status_of_sigterm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(5, folder, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert "ended by SIGTERM; it has kept no snapshot (snapshot_every_s), so another call starts from" in errors
    assert len(lines(folder)) < NUM_BATCHES


def test_a_program_that_handles_sigterm_itself_is_left_alone(tmp_path: Path) -> None:
    code = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
from lagom import experiment
from lagom.config import TorchDistributedConfig
def train():
    os.kill(os.getppid(), 0)
    return 1
if __name__ == "__main__":
    experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=1, run_dir=None))
    os.kill(os.getpid(), signal.SIGTERM)
    print("ended")
"""
    (tmp_path / "own.py").write_text(code)
    done = subprocess.run([sys.executable, str(tmp_path / "own.py")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["handled", "ended"]
