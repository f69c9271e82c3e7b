"""The notebook of examples/ that searches, and Ctrl-C in a search."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.notebooks.kernel import Notebook

PROGRAM = "import torch"
NOTEBOOK = Path(__file__).parents[2] / "examples" / "search.ipynb"


@pytest.mark.soak  # tests/extensions/search shows both by default
def test_the_example_searches_and_its_best_number_is_a_runs(notebook: Notebook) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells)
    ran = [notebook.run("".join(cell["source"])) for cell in cells]
    assert [cell.error for cell in ran] == [""] * len(cells)
    assert "complete" in ran[1].value["text/html"]
    assert "slots" in ran[1].displays[-1]["text/html"]
    best, again = ran[2].out.split()
    assert best == again


SPARK = """
import os, sys
from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
"""
SEARCH = """
import time
from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace

def train(x):
    time.sleep(0.02 if x < 0.7 else 600)
    return x

def search(launcher, seed):
    config = HyperparameterOptConfig(
        searchspace=Searchspace(x=("DOUBLE", [0.0, 1.0] if seed else [0.0, 0.1])), optimizer="random", seed=seed,
        num_trials=500 if seed else 3, num_slots=2, launcher=launcher,
    )
    return experiment.lagom(train, config)
"""


def test_the_stop_button_returns_what_there_is_and_the_next_cell_works(notebook: Notebook) -> None:
    interrupt(notebook, "local")


@pytest.mark.soak
def test_the_stop_button_ends_a_search_on_spark_too(notebook: Notebook) -> None:
    assert notebook.run(SPARK, patience_s=100).error == ""
    interrupt(notebook, "spark")
    assert notebook.run("spark.stop()").error == ""


def interrupt(notebook: Notebook, launcher: str) -> None:
    """Interrupt a search in which two trials sleep; then search again."""
    assert notebook.run(SEARCH).error == ""
    before = num_trials(notebook)
    cell = notebook.start(f"result = search({launcher!r}, 1)\n(result.interrupted, len(result.trials) >= 4)")
    deadline = time.monotonic() + 60
    while num_trials(notebook) < before + 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)  # by now both slots sleep
    notebook.interrupt()
    notebook.wait(cell)
    assert (cell.error, cell.value["text/plain"]) == ("", "(True, True)"), cell.traceback
    again = notebook.run(f"again = search({launcher!r}, 0)\n(again.interrupted, len(again.trials))")
    assert (again.error, again.value["text/plain"]) == ("", "(False, 3)"), again.traceback


def num_trials(notebook: Notebook) -> int:
    """Return the number of trials that have begun in all searches of the notebook."""
    return len(list(notebook.folder.glob("runs/*/trials/*")))
