"""The best trial is the best, and pruned ones are worse, for each optimizer, early stopping and direction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace

RANGES = Searchspace(x=("DOUBLE", [-1, 1]), y=("INTEGER", [-3, 3]))
LISTS = Searchspace(x=("DISCRETE", [-1.0, -0.5, 0.25, 0.75]), y=("DISCRETE", [-3, 0, 1, 2]))


def height(x: float, y: int, reporter: Any) -> float:
    """Return x + y, of which each step knows more; trials are in their final order from the first step on."""
    for step in range(1, 6):
        reporter.broadcast((x + y) * step / 5, step)
    return x + y


OPTIMIZERS = ("random", "grid", "tpe", "gp", "asha", "hyperband")
POLICIES = ("median", "asha", "none")
DIRECTIONS = ("min", "max")


def cases() -> Iterator[Any]:
    """Yield each optimizer with one policy in one direction by default, and with the others in a soak."""
    for place, optimizer in enumerate(OPTIMIZERS):
        for es_policy in POLICIES:
            for direction in DIRECTIONS:
                is_default = es_policy == POLICIES[place % 3] and direction == DIRECTIONS[place % 2]
                yield pytest.param(optimizer, es_policy, direction, marks=() if is_default else pytest.mark.soak)


@pytest.mark.parametrize(("optimizer", "es_policy", "direction"), list(cases()))
def test_the_best_trial_is_the_best(optimizer: str, es_policy: str, direction: Any) -> None:
    config = HyperparameterOptConfig(
        searchspace=LISTS if optimizer == "grid" else RANGES,
        num_trials=12 if optimizer == "gp" else 16,
        optimizer=optimizer,
        es_policy=es_policy,
        es_min=4,
        direction=direction,
        seed=5,
        launcher="inline",
        run_dir=None,
    )
    result = experiment.lagom(height, config)
    by_state: dict[str, list[float]] = {"complete": [], "pruned": [], "failed": []}
    for trial in result.trials:
        by_state[trial["state"]].append(trial["params"]["x"] + trial["params"]["y"])
    best = (min if config.direction == "min" else max)(by_state["complete"])
    assert (result.best_value, result["best_val"]) == (best, best)
    assert result.best_config["x"] + result.best_config["y"] == best
    worst = (max if config.direction == "min" else min)(by_state["complete"])
    assert result["worst_val"] == worst
    assert by_state["failed"] == []
    if es_policy == "none" and optimizer not in ("asha", "hyperband"):
        assert by_state["pruned"] == []
    elif optimizer != "hyperband":  # in which each bracket has an order of its own
        assert by_state["pruned"]
        assert all((value > best) == (config.direction == "min") for value in by_state["pruned"])
