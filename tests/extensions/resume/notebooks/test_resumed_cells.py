"""A run of a function of a cell goes on from its snapshot, executed in a real kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.notebooks.kernel import Notebook

PROGRAM = """
import json
import os
import threading
import time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from lagom import experiment
from lagom.config import TorchDistributedConfig

class Sums(list):
    def add(self, x):
        self.append(int(x.sum()))

sums = Sums()

def train():
    for (x,) in DataLoader(TensorDataset(torch.arange(60)), batch_size=2):
        sums.add(x)
        time.sleep(0.05)
    return sums

def kill(folder):
    while True:
        time.sleep(0.01)
        for path in Path(folder).glob("*/run.json"):
            facts = json.loads(path.read_text())
            if facts.get("snapshots"):
                return os.kill(facts["ranks"]["1"]["pid"], 9)

def run(folder):
    thread = threading.Thread(target=kill, args=[folder])
    thread.start()
    result = experiment.lagom(
        train, TorchDistributedConfig(launcher="local", world_size=2, run_dir=folder, snapshot_every_s=0.1)
    )
    thread.join()
    return type(result.value) is Sums, list(result.value), result.failures[0]["resumed_from"]
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
def test_a_run_of_a_cell_goes_on_from_its_snapshot(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.run(f"run({str(tmp_path)!r})")
    assert cell.error == ""
    is_same, sums, resumed_from = eval(cell.value["text/plain"])
    assert (is_same, sums) == (True, [4 * number + 1 for number in range(30)])
    assert "batch" in resumed_from
