"""The programs in ``examples/horovod``: a notebook's functions, and a script by horovodrun's command line."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import mnist_data
from lagom import cli
from lagom.extensions.compat import horovod

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples" / "horovod" / "notebook.py"
SCRIPT = ROOT / "examples" / "horovod" / "mnist.py"
TINY = ["--epochs", "1", "--images", "500"]


def _check_notebook(out: str, folder: Path) -> None:
    plain, through_lagom, by_runner = re.findall(r"world size (\d): loss ([\d.]+) in .*; (\d+) saved", out)
    assert plain[0] == "1"
    assert (through_lagom[0], by_runner[0]) == ("2", "2")
    assert float(through_lagom[1]) == pytest.approx(float(plain[1]), abs=2e-4)
    assert max(float(loss) for _, loss, _ in (plain, through_lagom, by_runner)) < 2.4  # log(10) is 2.3
    assert torch.load(folder / "checkpoints" / "checkpoint-1.pt")["model"].keys() >= {"hidden.weight"}


@pytest.fixture
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setenv("LAGOM_RUN_DIR", str(tmp_path / "runs"))


@pytest.mark.soak  # test_horovod_runner.py runs such functions by default
@pytest.mark.usefixtures("_in_folder")
@pytest.mark.timeout(140)
def test_the_notebooks_two_functions_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["notebook.py", *TINY, "--folder", str(tmp_path), "--launcher", "local"])
    horovod.install()  # as its import does the first time
    try:
        runpy.run_path(str(NOTEBOOK), run_name="__main__")  # like a notebook's cells
    finally:
        horovod.remove()
    _check_notebook(capfd.readouterr().out, tmp_path)


@pytest.mark.integration
@pytest.mark.soak
@pytest.mark.timeout(140)
def test_the_notebooks_two_functions_run_on_spark(tmp_path: Path) -> None:
    command = [sys.executable, str(NOTEBOOK), *TINY, "--folder", str(tmp_path), "--launcher", "spark"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _check_notebook(done.stdout, tmp_path)


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.timeout(140)
def test_a_script_runs_by_horovodruns_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mnist_data.write(tmp_path / "mnist", num_train=640, num_test=100)
    options = ["--epochs", "1", "--fp16-allreduce", "--clip", "5", "--batches-per-allreduce", "2", "--lr", "0.03"]
    options += ["--data", "mnist"]
    line = ["-np", "2", "-H", "localhost:2", "--timeline-filename", "t.json", "python", str(SCRIPT), *options]
    status = cli.main(["run", *line])
    out, err = capfd.readouterr()
    assert status == 0, err
    # 640 images in batches of 64, on each of 2 ranks.
    assert {f"[rank {rank}] epoch 1, batch 0 of 5:" in out for rank in (0, 1)} == {True}
    assert len(re.findall(r"test loss [\d.]+, accuracy [\d.]+%", out)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mnist", "runs", "t.json"]
    names = {event.get("name") for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert names >= {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "BROADCAST"}


@pytest.mark.soak
@pytest.mark.usefixtures("_in_folder")
@pytest.mark.timeout(140)
def test_a_script_goes_on_from_its_checkpoint_with_adasum(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mnist_data.write(tmp_path / "mnist", num_train=640, num_test=100)
    for epoch in (1, 2):
        options = ["--epochs", "1", "--use-adasum", "--data", "mnist", "--checkpoint", "checkpoint.pt"]
        status = cli.main(["run", "-np", "2", str(SCRIPT), *options])
        out, err = capfd.readouterr()
        assert status == 0, err
        assert f"epoch {epoch}: test loss" in out  # rank 0 has read the checkpoint, and told the others
        assert torch.load(tmp_path / "checkpoint.pt")["epoch"] == epoch


def test_the_page_for_people_from_horovod_names_tests_that_exist() -> None:
    page = ROOT / "docs" / "appendix" / "horovod_calls.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    files = {
        "E": "tests/extensions/compat/test_horovod_exchanges.py",
        "O": "tests/extensions/compat/test_horovod_optimizer.py",
        "R": "tests/extensions/compat/test_horovod_runner.py",
        "X": "tests/extensions/compat/test_horovod_examples.py",
        "C": "tests/extensions/compat/test_horovodrun.py",
        "D": "tests/test_distributed_programs.py",
    }
    for row in rows:
        cell = row.rstrip("| ").rpartition("|")[2]
        parts = re.findall(r"\b([EORXCD])\b((?:[ ,]*`[a-z0-9_]+`)*)", cell)
        assert parts, row
        for letter, names in parts:
            text = (ROOT / files[letter]).read_text()
            for name in re.findall(r"`([a-z0-9_]+)`", names):
                assert f"def {name}(" in text or f"def test_{name}(" in text, (row, name)
