"""A program's output is shown once, as plain Python shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lagom import cli

PROGRAM = """
import logging, os, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
os.makedirs("out")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1, dtype=torch.float64)
loader = DataLoader(TensorDataset(torch.rand(12, 2, dtype=torch.float64)), batch_size=3)
form = "{desc}{n_fmt}/{total_fmt}"
for epoch in range(2):
    for (x,) in tqdm(loader, desc=f"epoch {epoch} ", bar_format=form, mininterval=0, dynamic_ncols=False):
        model.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters():  # an optimizer would have plain Python import Dynamo
            p.data -= 0.1 * p.grad
    with torch.no_grad():
        loss = sum(model(x).square().sum().item() for (x,) in loader)
    print(f"epoch {epoch}: {loss:.6f}", flush=True)
    print("to standard error", epoch, file=sys.stderr)
    logging.info("checkpoint %d", epoch)
    torch.save(model.state_dict(), "out/last.pt")
    with open("out/log.csv", "a") as file:
        print(epoch, f"{loss:.6f}", sep=",", file=file)
warnings.warn("a warning of the program's")
os.write(1, b"written by its descriptor\\n")
sys.stdout.write("no newline at the end")
"""


def shown(folder: Path, run: Callable[[], tuple[str, str]]) -> tuple[str, list[str]]:
    """Standard output of ``run`` in ``folder``, and the lines of standard error that are not lagom's own."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        out, err = run()
    # Warnings name the script's file.
    lines = err.replace("\r", "\n").replace(f"{folder}{os.sep}", "").splitlines()
    return out, [line for line in lines if line and not line.startswith("lagom: ")]


def _by_python() -> tuple[str, str]:
    command, env = [sys.executable, "program.py"], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize("world_size", ["2", *(pytest.param(size, marks=pytest.mark.soak) for size in ("1", "3"))])
def test_prints_logs_and_progress_bars_are_shown_once(
    world_size: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def by_lagom() -> tuple[str, str]:
        assert cli.main(["run", "--master", "local", "-n", world_size, "program.py"]) == 0
        out, err = capfd.readouterr()
        return out, err

    plain = shown(tmp_path / "plain", _by_python)
    found = shown(tmp_path / "shared", by_lagom)
    assert found == plain
    assert plain[0].count("epoch 1: ") == 1
    assert "epoch 1 4/4" in plain[1]
    for name in ("log.csv", "last.pt"):
        ours, theirs = (tmp_path / run / "out" / name for run in ("shared", "plain"))
        if name == "log.csv" or world_size == "1":
            assert ours.read_bytes() == theirs.read_bytes()
    assert sorted(os.listdir(tmp_path / "shared" / "out")) == ["last.pt", "log.csv"]


LOGGING = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, handlers=[logging.FileHandler("run.log"), logging.StreamHandler(sys.stdout)])
logging.info("begun")
logging.getLogger("lagom").warning("runs whole")
"""


def test_what_lagom_logs_begins_a_line_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(
        "import logging, sys\nsys.stderr.write('3/4')\nlogging.getLogger('lagom').warning('runs whole')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))
        assert cli.main(["run", "--master", "local", "-n", "2", "program.py"]) == 0
    assert "3/4\nlagom: runs whole\n" in capfd.readouterr().err


def test_what_lagom_logs_stays_out_of_the_programs_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(LOGGING)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))
        assert cli.main(["run", "--master", "local", "-n", "2", "program.py"]) == 0
    shown = capfd.readouterr()
    assert (tmp_path / "run.log").read_text() == shown.out == "INFO:root:begun\n"
    assert shown.err.splitlines().count("lagom: runs whole") == 1
