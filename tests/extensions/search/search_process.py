"""A search in a process of its own, to be interrupted or killed while its trials run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[3]
PROGRAM = """
import contextlib, json, sys, time
from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from tests.integration import clusters

def train(x):
    time.sleep({seconds})
    return x

resume = sys.argv[1] if len(sys.argv) > 1 else None
config = HyperparameterOptConfig(
    searchspace=Searchspace(x=("DOUBLE", [0.0, 1.0])), optimizer="random", seed=1, num_trials={trials}, num_slots=2,
    launcher="{launcher}", run_dir="runs", resume=resume,
)
with clusters.local(2) if config.launcher == "spark" else contextlib.nullcontext():
    result = experiment.lagom(train, config)
    print(json.dumps([result.interrupted, [[one["number"], one["state"], one["value"]] for one in result.trials]]))
"""


def start(seconds: object, trials: int, *args: str, launcher: str = "local") -> subprocess.Popen[str]:
    """Start a process in the working directory that searches, with ``trials`` trials that sleep ``seconds`` each.

    The process prints as JSON whether the search was interrupted, and the number, state and value of each trial.

    Args:
        args: the folder of an earlier search to resume, if any.
    """
    _write(seconds, trials, launcher)
    pipe, env = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "program.py", *args], stdout=pipe, stderr=pipe, text=True, env=env)


def run_here(seconds: object, trials: int, resume: str) -> Any:
    """Resume such a search as the main program of this process; return what it prints."""
    _write(seconds, trials, "local")
    with patch.object(sys, "argv", ["program.py", resume]), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path("program.py", run_name="__main__")
    return json.loads(out.getvalue())


def _write(seconds: object, trials: int, launcher: str) -> None:
    Path("program.py").write_text(PROGRAM.format(seconds=seconds, trials=trials, launcher=launcher))


def wait_for_trials(number: int) -> Path:
    """Wait until so many trials have begun; return the folder of the search."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if len(found := sorted(Path("runs").glob("*/trials/*"))) >= number:
            return found[0].parents[1]
        time.sleep(0.02)
    raise AssertionError("no trials have begun")
