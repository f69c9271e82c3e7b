"""The display of a run in a notebook, executed in a real kernel and drawn by a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.notebooks.kernel import Notebook

PROGRAM = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train(fails=False):
    model = torch.nn.Linear(2, 1)
    for step, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(80, 2)), batch_size=4)):
        model(x).mean().backward()
        time.sleep(0.05)
        if fails and step == 15 and lagom.rank() == 1:
            raise ValueError("a <bad> sample")
    return {"loss": 0.5 + lagom.rank()}

def config(**hparams):
    return TorchDistributedConfig(launcher="local", world_size=2, hb_interval=0.1, hparams=hparams)
"""


def test_a_table_renews_itself_and_the_result_shows_what_came_of_it(notebook: Notebook) -> None:
    cell = notebook.run("experiment.lagom(train, config())")
    assert cell.error == ""
    first, *_, last = cell.displays
    assert len(cell.displays) >= 2
    assert "this epoch" in last["text/plain"] or last["text/plain"].endswith(", done")
    assert "20/20" in last["text/html"]
    assert "<b>train on this machine</b>: 80 samples, done</div>" in last["text/html"]
    assert first["text/html"] != last["text/html"]
    assert "rank 1" in cell.value["text/html"]
    assert "<svg" in cell.value["text/html"]


def test_a_browser_draws_the_bars_and_the_lines(notebook: Notebook, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here to draw the page")
    cell = notebook.run("experiment.lagom(train, config())")
    colours = drawn(chromium, cell.displays[-1]["text/html"] + cell.value["text/html"], tmp_path)
    assert (0x2F, 0x8F, 0xD0) in colours  # a bar
    assert (0x00, 0x72, 0xB2) in colours  # the line of rank 0


def test_the_table_of_a_run_that_failed_says_so(notebook: Notebook) -> None:
    cell = notebook.run("experiment.lagom(train, config(fails=True))")
    assert cell.error == "ValueError: a <bad> sample"
    assert "samples, failed on rank 1: ValueError</div>" in cell.displays[-1]["text/html"]


def test_a_front_end_that_renews_nothing_has_the_lines_and_the_result(notebook: Notebook) -> None:
    """It keeps the table's first state; standard error and the result show everything else."""
    cell = notebook.run("result = experiment.lagom(train, config()); print(result)")
    assert "lagom: train: 2 ranks on this machine" in cell.err
    assert "Result of train: 2 ranks on this machine" in cell.out
    assert set(cell.displays[0]) == {"text/html", "text/plain"}


def drawn(chromium: str, page: str, folder: Path) -> set[Any]:
    """The colours of ``page`` as a browser shows it."""
    (folder / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{page}")
    shot = folder / "page.png"
    options = ["--no-sandbox", "--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [chromium, *options, "--window-size=900,600", f"--screenshot={shot}", f"file://{folder / 'page.html'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=170)
    with Image.open(shot) as picture:
        return {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or []}
