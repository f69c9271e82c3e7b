"""Searches with a ``Study`` alone: a space, a curve of losses for each trial, and one slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.extensions.search.on_rank.messages import SlotJoin
from lagom.extensions.search.study import Study
from lagom.extensions.search.trial_source import TrialOutcome, TrialSpec

SPACE = Searchspace(
    lr=("DOUBLE", [1e-5, 1e-1], "log"),
    momentum=("DOUBLE", [0, 1]),
    units=("INTEGER", [32, 512]),
    depth=("DISCRETE", [1, 2, 4]),
    act=("CATEGORICAL", ["relu", "tanh"]),
)
LISTS = Searchspace(depth=("DISCRETE", [1, 2, 4]), units=("INTEGER", [3, 6]), act=("CATEGORICAL", ["relu", "tanh"]))


def slot_join(slot: int, host: str) -> SlotJoin:
    """Return the first message of a slot on ``host`` that does not see the driver's files."""
    facts: dict[str, Any] = {"pid": 1, "ranks": [0], "ip": "", "store": None, "python": "", "torch": "", "gpus": []}
    return SlotJoin(task=slot, host=host, cores=1, sees_driver=False, **facts)


def losses(params: Mapping[str, Any]) -> list[float]:
    """Return five losses of a trial; one in eight ends with what is not a number."""
    sizes = [len(value) / 10 if isinstance(value, str) else math.tanh(math.log1p(value)) for value in params.values()]
    score = sum((1 + place) * size for place, size in enumerate(sizes))
    return [score + math.sin(50 * score * (1 + step)) for step in range(4)] + [
        math.nan if int(score * 1e4) % 8 == 0 else score / 5
    ]


def search(config: HyperparameterOptConfig, folder: Path | None = None) -> Study:
    """Run the search with one slot."""
    study = Study(config, folder)
    while (spec := study.ask()) is not None:
        run(study, spec)
    return study


def run(study: Study, spec: TrialSpec) -> None:
    curve = losses(spec.params)
    for step, value in enumerate(curve[:4]):
        if study.report(spec.number, step, value):
            return study.tell(spec.number, TrialOutcome(state="pruned", value=value))
    if math.isnan(curve[4]):
        return study.tell(spec.number, TrialOutcome(state="failed", error="ValueError: the metric is nan"))
    return study.tell(spec.number, TrialOutcome(state="complete", value=curve[4]))


def small(**fields: Any) -> HyperparameterOptConfig:
    """Return a config of four random trials."""
    given: dict[str, Any] = {"searchspace": SPACE, "optimizer": "random", "num_trials": 4, "seed": 3}
    return HyperparameterOptConfig(**given | fields)
