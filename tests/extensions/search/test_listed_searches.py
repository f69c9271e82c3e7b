"""Searches among the runs that ``lagom runs`` lists."""

from __future__ import annotations

from pathlib import Path

import pytest

import lagom
from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from tests.watch.test_runs import lagom_says


@pytest.mark.parametrize("last", ["returned", "interrupted"])
def test_a_search_is_listed_with_its_best_value(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAGOM_RUN_DIR", str(tmp_path))

    def train(lr: float) -> dict[str, float]:
        if lr == 3.0 and last == "interrupted":
            raise KeyboardInterrupt
        return {"loss": 1 / lr}

    config = HyperparameterOptConfig(
        searchspace=Searchspace(lr=("DISCRETE", [1.0, 2.0, 3.0])),
        num_trials=3,
        optimizer="grid",
        direction="min",
        optimization_key="loss",
        es_policy="none",
        launcher="inline",
        seed=1,
    )
    result = experiment.lagom(train, config)
    line = lagom_says(capsys, "runs").splitlines()[1]
    assert ("interrupted: " in line) == result.interrupted == (last == "interrupted")
    done = [trial["value"] for trial in result.trials if trial["state"] == "complete"]
    wanted = f"best {min(done):.6g} of {len(result.trials)} trials" if done else f"0 of {len(result.trials)} trials"
    assert wanted in line
    assert lagom.show(next(tmp_path.glob("*-train-*"))) is not None
