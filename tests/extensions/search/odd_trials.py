"""A function whose trials end in every way that a trial can end, and the rows that a search has of them."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace

ROWS: dict[str, tuple[str, float | None, str]] = {
    "number": ("complete", 1.0, ""),
    "tensor": ("complete", 2.0, ""),
    "dict": ("complete", 3.0, ""),
    "silent": ("complete", 4.0, ""),
    "pruned": ("pruned", 9.0, ""),
    "nan": ("failed", None, "ValueError: the metric is nan"),
    "raising": ("failed", None, "KeyError: 'no such thing'"),
    "killed": ("failed", None, "SIGKILL"),
    "hanging": ("failed", None, "StallError"),
}
"""State, value and a part of the error of each kind of trial."""


def end(kind: str, reporter: Any) -> Any:
    """End in the way that ``kind`` says; report a value first, unless it is "silent"."""
    if kind != "silent":
        reporter.broadcast(9.0 if kind == "pruned" else 5.0, 0)
    if kind == "raising":
        raise KeyError("no such thing")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hanging":
        time.sleep(600)
    returned = {"number": 1, "tensor": torch.tensor([2.0]), "dict": {"loss": 3.0, "epochs": 7}, "nan": math.nan}
    return returned.get(kind, 4.0)


class Prunes:
    """A pruner for trials that report a 9."""

    def prune(self, study: Any, trial: Any) -> bool:
        """Return whether the last value is a 9."""
        return bool(trial.last_step is not None and trial.intermediate_values[trial.last_step] == 9.0)


def search(launcher: Any, run_dir: Path) -> Any:
    """Search over all kinds of trials, two at a time."""
    config = HyperparameterOptConfig(
        searchspace=Searchspace(kind=("CATEGORICAL", list(ROWS))),
        optimizer="grid",
        direction="min",
        optimization_key="loss",
        es_policy=Prunes(),
        num_slots=2,
        trial_timeout_s=5.0,
        hb_interval=0.1,
        launcher=launcher,
        run_dir=run_dir,
    )
    return experiment.lagom(end, config)


def check(result: Any) -> None:
    """Check that every kind of trial has its row, and that the best of those that ended well is the best."""
    assert {trial["params"]["kind"] for trial in result.trials} == ROWS.keys()
    for trial in result.trials:
        state, value, error = ROWS[trial["params"]["kind"]]
        assert (trial["state"], trial["value"]) == (state, value), trial
        assert error in trial["error"]
        assert bool(trial["error"]) == (state == "failed")
    (raising,) = (trial for trial in result.trials if trial["params"]["kind"] == "raising")
    assert "in end" in raising["traceback"]
    assert (result.best_config, result.best_value) == ({"kind": "number"}, 1.0)
