"""A person debugs a rank in a notebook: the cell asks for each line."""

from __future__ import annotations

from tests.notebooks.kernel import Notebook

PROGRAM = """
import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train():
    secret = 40 + lagom.rank()
    breakpoint()
    if secret == 41:
        raise KeyError(secret)

def stop():
    secret = 40
    breakpoint()

config = TorchDistributedConfig(launcher="local", world_size=2)
debugged = TorchDistributedConfig(launcher="local", world_size=2, debug=1)
"""


def test_a_cell_debugs_a_rank(notebook: Notebook) -> None:
    cell = notebook.start("experiment.lagom(train, debugged)")
    assert notebook.type("p secret") == "(Pdb) "
    assert notebook.type("c") == "(Pdb) "
    assert notebook.type("p 'failed', secret") == "(Pdb) "
    notebook.type("q")
    notebook.wait(cell)
    assert cell.error.startswith("KeyError: ")
    assert ")train()\n-> " in cell.out
    assert "('failed', 41)\n" in cell.out
    assert "rank 1 of 2 has failed, and is in the debugger" in cell.err


def test_the_stop_button_ends_a_run_that_is_debugged(notebook: Notebook) -> None:
    cell = notebook.start("experiment.lagom(stop, config)")
    assert notebook.type("p 'here', secret") == "(Pdb) "
    notebook.wait(cell, until="('here', 40)")
    notebook.interrupt()
    notebook.wait(cell)
    assert cell.error.startswith("KeyboardInterrupt")
    assert notebook.run("experiment.lagom(lagom.world_size, config).value").value["text/plain"] == "2"


def test_a_notebook_that_runs_as_a_batch_job_is_told_that_nobody_can_type(notebook: Notebook) -> None:
    cell = notebook.start("experiment.lagom(stop, config)", has_input=False)
    notebook.wait(cell)
    assert cell.error.startswith("LagomError: breakpoint() on rank 0, and nobody can type at the driver"), (
        cell.traceback
    )
