"""Things that people do in notebooks beside training, each in a cell of a real kernel."""

from __future__ import annotations

import re

import pytest

from tests.notebooks.kernel import Notebook

PROGRAM = """
import asyncio, concurrent.futures, inspect, logging, os, sys, threading, time, warnings
import torch
import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig

def go(function, **more):
    return experiment.lagom(function, TorchDistributedConfig(launcher="local", world_size=2, **more))
"""


def value(notebook: Notebook, text: str) -> str:
    """Return the value of the cell's last line."""
    cell = notebook.run(text)
    assert cell.error == "", cell.traceback
    return cell.value["text/plain"]


def test_functions_and_classes_that_are_defined_anew_are_the_new_ones(notebook: Notebook) -> None:
    old = "class Net(torch.nn.Linear):\n    x = 1\nfirst = go(lambda module: module(2, 1), module=Net)\nfirst.value.x"
    assert value(notebook, old) == "1"
    new = old.replace("x = 1", "x = 2").replace("first", "second")
    assert value(notebook, new) == "2"
    assert value(notebook, "isinstance(second.value, Net), isinstance(first.value, Net)") == "(True, False)"


def test_an_error_shows_the_line_of_the_cell(notebook: Notebook) -> None:
    cell = notebook.run("def train():\n    missing = 1 / 0  # here\ngo(train)")
    assert cell.error == "ZeroDivisionError: division by zero"
    assert cell.traceback.count("# here") > 1  # of the cell itself, and of the rank's traceback
    assert re.search(r"\n  Cell In\[\d+\], line 2, in train\n", cell.traceback)  # of the rank's
    assert "ipykernel_" not in cell.traceback
    assert value(notebook, "def train():\n    return inspect.getsource(train)\ngo(train).value").startswith(
        "'def train"
    )


def test_what_other_cells_have_set_holds(notebook: Notebook) -> None:
    cell = notebook.run("""
        torch.set_default_dtype(torch.float64)
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
        warnings.filterwarnings("ignore", "careful")
        def train():
            logging.getLogger("mine").info("from %s", lagom.rank())
            warnings.warn("careful")
            return torch.nn.Linear(2, 1).weight.dtype
        found = go(train).value
        torch.set_default_dtype(torch.float32)
        logging.basicConfig(level=logging.WARNING, force=True)
        found
    """)
    assert cell.value["text/plain"] == "torch.float64"
    assert "INFO from 0\n" in cell.err
    assert "INFO from 1" not in cell.err
    assert "careful" not in cell.err


@pytest.mark.soak  # tests/driver/test_local.py has several threads by default
def test_two_runs_at_once_in_threads_and_in_an_awaited_cell(notebook: Notebook) -> None:
    threads = """
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda name: go(lambda: name).value, "ab"))
        found
    """
    assert value(notebook, threads) == "['a', 'b']"
    awaited = """
        async def run(name):
            return (await asyncio.to_thread(go, lambda: name)).value
        await asyncio.gather(run("a"), run("b"))
    """
    assert value(notebook, awaited) == "['a', 'b']"
    assert value(notebook, "async def run():\n    return go(lambda: 3).value\nawait run()") == "3"


def test_magics_and_folders(notebook: Notebook) -> None:
    assert notebook.run("%%capture kept\nresult = go(lambda: print('said'))").out == ""
    assert value(notebook, "kept.stdout, result.world_size") == r"('said\n', 2)"
    assert "Wall time" in notebook.run("%%time\ngo(lambda: 1).value").out
    moved = """
        os.makedirs("elsewhere"); os.chdir("elsewhere")
        def train():
            open("written", "w").write("x")
            return os.path.basename(os.getcwd())
        found = go(train).value, os.path.exists("written")
        os.chdir("..")
        found
    """
    assert value(notebook, moved) == "('elsewhere', True)"
    assert "EOFError" in notebook.run("go(lambda: input('name? '))").error  # and does not wait for anybody
