"""The square button of a notebook: the run ends, nothing of it is left, and the next cell works."""

from __future__ import annotations

import time

import pytest

from tests.integration import programs
from tests.notebooks.kernel import Notebook

PROGRAM = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train(folder):
    os.system(f"echo {os.getpid()} > {folder}/{lagom.rank()}")  # there at once, unlike what rank 1 writes itself
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=4, num_workers=1)
    for epoch in range(1_000_000):  # for longer than any test
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        print(f"epoch {epoch} is done", flush=True)

os.mkdir("pids")
config = TorchDistributedConfig(launcher="local", world_size=2, hparams={"folder": "pids"}, hb_interval=0.1)
"""

SPARK = """
import sys
from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
on_spark = TorchDistributedConfig(launcher="spark", world_size=2, hparams={"folder": "pids"}, hb_interval=0.1)
"""

NO_JOBS = """
tracker, deadline = spark.sparkContext.statusTracker(), time.monotonic() + 30
while tracker.getActiveJobsIds():
    assert time.monotonic() < deadline, "the job goes on"
    time.sleep(0.05)
"""


def test_a_run_is_interrupted_nothing_is_left_and_the_next_cell_works(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = interrupted(notebook, "config")
    assert notebook.run("experiment.lagom(lagom.world_size, config).value").value["text/plain"] == "2"
    with capsys.disabled():
        print(f"\nthe cell ended {seconds:.2f} s after its interrupt")


@pytest.mark.soak
def test_a_run_on_spark_is_interrupted_its_job_ends_and_the_next_cell_works(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notebook.run(SPARK, patience_s=100).error == ""
    seconds = interrupted(notebook, "on_spark")
    cell = notebook.run(NO_JOBS)
    assert cell.error == "", cell.traceback
    assert notebook.run("experiment.lagom(lagom.world_size, on_spark).value").value["text/plain"] == "2"
    assert notebook.run("spark.stop()").error == ""
    with capsys.disabled():
        print(f"\nthe cell ended {seconds:.2f} s after its interrupt")


def interrupted(notebook: Notebook, config: str) -> float:
    """Interrupt a run with ``config`` and wait until its ranks have ended; the seconds until its cell ended."""
    for path in (notebook.folder / "pids").iterdir():
        path.unlink()
    cell = notebook.start(f"experiment.lagom(train, {config})")
    notebook.wait(cell, until="epoch 1 is done", patience_s=100)
    assert cell.error == "", cell.traceback
    pids = programs.pids_in(notebook.folder / "pids", 2)
    start = time.monotonic()
    notebook.interrupt()
    notebook.wait(cell)
    seconds = time.monotonic() - start
    assert cell.error.startswith("KeyboardInterrupt: "), cell.traceback
    assert cell.traceback.count("lagom/experiment.py") == 1, cell.traceback
    assert "launchers" not in cell.traceback
    assert cell.displays[-1]["text/plain"].endswith(", interrupted")
    while any(programs.alive(pid) for pid in pids):
        time.sleep(0.02)
    return seconds
