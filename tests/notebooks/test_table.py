"""The display of a run in a notebook, executed in a real kernel and drawn by a real browser."""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.notebooks.kernel import Notebook

PROGRAM = """
import os
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
            if fails == "killed":
                os.kill(os.getpid(), 9)
            raise ValueError("a <bad> sample")
    return {"loss": 0.5 + lagom.rank()}

def config(**hparams):
    settings = {"launcher": "local", "world_size": 2, "hb_interval": 0.1, "max_failures": 1}
    return TorchDistributedConfig(hparams=hparams, **settings)
"""


def test_a_table_renews_itself_and_the_result_shows_what_came_of_it(notebook: Notebook) -> None:
    cell = notebook.run("experiment.lagom(train, config())")
    assert cell.error == ""
    first, *_, last = cell.displays
    assert len(cell.displays) >= 2
    assert "this epoch" in last["text/plain"] or last["text/plain"].endswith(", done")
    assert "20/20" in last["text/html"]
    assert "<b>train</b>: 2 ranks on this machine (" in last["text/html"]
    assert "80 samples, <b>done</b></div>" in last["text/html"]
    assert "lagom: train" not in cell.err
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


@pytest.mark.soak  # tests/watch/test_notebook_table.py shows it by default
def test_the_table_of_a_run_that_failed_says_so(notebook: Notebook) -> None:
    cell = notebook.run("experiment.lagom(train, config(fails=True))")
    assert cell.error == "ValueError: a <bad> sample"
    assert "samples, <b>failed on rank 1: ValueError</b></div>" in cell.displays[-1]["text/html"]


@pytest.mark.soak  # a table is made as above; tests/driver/test_attempts.py has attempts
def test_each_attempt_of_a_run_that_loses_a_rank_has_a_table(notebook: Notebook) -> None:
    cell = notebook.run("experiment.lagom(train, config(fails='killed'))")
    assert cell.error.startswith("RankError: rank 1 was killed by SIGKILL")
    assert "(the run was started 2 times: max_failures=1)" in cell.error
    ended = [display for display in cell.displays if "rank 1 was killed by SIGKILL</b></div>" in display["text/html"]]
    assert len(ended) == 2
    assert cell.err.count("the run restarts, attempt 2 of 2\n") == 1


@pytest.mark.soak  # the first test has both by default
def test_a_front_end_that_renews_nothing_has_the_lines_and_the_result(notebook: Notebook) -> None:
    """The front end keeps the table's first state; the result shows everything else."""
    cell = notebook.run("result = experiment.lagom(train, config()); print(result)")
    assert "lagom: train: 2 ranks on this machine (" in cell.displays[0]["text/plain"]
    assert "Result of train: 2 ranks on this machine" in cell.out
    assert set(cell.displays[0]) == {"text/html", "text/plain"}


def test_a_picture_that_rank_0_displays_is_one_and_a_bar_is_one_display(notebook: Notebook) -> None:
    cell = notebook.run("""
        def shows():
            from PIL import Image
            from tqdm.auto import tqdm
            display(Image.new("RGB", (40, 20), (200, 30, 30)), {"not": "a picture"})
            for number in tqdm(range(30), desc="bar", mininterval=0):
                time.sleep(0.02)
            print("after it")

        experiment.lagom(shows, config()).per_rank
    """)
    assert cell.error == ""
    pictures = [base64.b64decode(one["image/png"]) for one in cell.displays if "image/png" in one]
    assert [Image.open(io.BytesIO(picture)).size for picture in pictures] == [(40, 20)]
    assert cell.out == "{'not': 'a picture'}\nafter it\n"
    assert cell.err == ""
    bars = [one["text/plain"] for one in cell.displays if "bar:" in one.get("text/plain", "")]
    assert "100%" in bars[-1]
    assert "\n" not in bars[-1]


def drawn(chromium: str, page: str, folder: Path) -> set[Any]:
    """The colours of ``page`` as a browser shows it."""
    (folder / "page.html").write_text(f"<!doctype html><meta charset=utf-8><body>{page}")
    shot = folder / "page.png"
    options = ["--no-sandbox", "--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [chromium, *options, "--window-size=900,600", f"--screenshot={shot}", f"file://{folder / 'page.html'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=170)
    with Image.open(shot) as picture:
        return {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or []}
