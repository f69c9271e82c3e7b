"""``SearchResult``: the best trial, all trials, and Maggy's names for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lagom.errors import LagomError
from lagom.extensions.search.search_result import SearchResult


def trial(number: int, value: float | None, state: str = "complete", **params: Any) -> dict[str, Any]:
    """Return a trial as a study has it."""
    error = "ValueError: <no> way" if state == "failed" else ""
    facts = {"seconds": 1.5, "slot": 0, "error": error, "traceback": "", "folder": None, "returned": None}
    return {"number": number, "params": params or {"lr": number / 10}, "value": value, "state": state, **facts}


TRIALS = [
    trial(0, 0.5),
    trial(1, 0.9, state="pruned"),
    trial(2, 0.25),
    trial(3, None, state="failed"),
    trial(4, 0.75, lr=0.4, momentum=0.9),
    trial(5, 0.1, state="pruned"),
    trial(6, 0.75),
]


def result(trials: list[dict[str, Any]] = TRIALS, direction: str = "max", **facts: Any) -> SearchResult:
    """Return the result of a search over ``trials``."""
    return SearchResult(trials, direction=direction, hparams={"epochs": 3}, name="train", seconds=12.5, **facts)


def test_the_best_is_of_the_trials_that_ran_to_their_end() -> None:
    largest, smallest = result(), result(direction="min")
    assert (largest.best_trial, largest.best_value) == (TRIALS[4], 0.75)
    assert largest.best_config == {"epochs": 3, "lr": 0.4, "momentum": 0.9}
    assert (smallest.best_trial, smallest.best_value) == (TRIALS[2], 0.25)
    assert largest.trials == TRIALS


def test_maggys_keys() -> None:
    assert dict(result()) == {
        "best_id": 4,
        "best_val": 0.75,
        "best_config": {"epochs": 3, "lr": 0.4, "momentum": 0.9},
        "worst_id": 2,
        "worst_val": 0.25,
        "worst_config": {"epochs": 3, "lr": 0.2},
        "avg": 0.5625,
        "metric_list": [0.5, 0.25, 0.75, 0.75],
        "num_trials": 7,
        "early_stopped": 2,
    }
    assert (result(direction="min")["best_id"], result(direction="min")["worst_id"]) == (2, 4)
    with pytest.raises(KeyError, match="'best_val'"):
        result()["test result"]


def test_without_a_whole_trial_there_is_no_best() -> None:
    found = result([TRIALS[1], TRIALS[3]])
    assert dict(found) == {"metric_list": [], "num_trials": 2, "early_stopped": 1}
    for ask in (lambda: found.best_config, lambda: found.best_value, lambda: found["best_val"], lambda: found["avg"]):
        with pytest.raises(LagomError, match=r"1 pruned, 1 failed; the last error was ValueError: <no> way"):
            ask()
    assert "1 pruned, 1 failed" in repr(found)
    assert "ValueError" in found._repr_html_()
    assert "none" in repr(result([]))


def test_it_is_printed_in_three_lines() -> None:
    assert repr(result(where="2 slots", interrupted=True)).splitlines() == [
        "Search of train on 2 slots, 12.50 s, interrupted",
        "  trials: 4 complete, 2 pruned, 1 failed",
        "  best: 0.75, the largest, of trial 4 with lr=0.4, momentum=0.9",
    ]


def test_hyperparameters_are_shown_by_their_names() -> None:
    shown = repr(result([trial(0, 1.0, act="tanh", cell=Path, loss=trial, layers=[1, 2], lr=1e-4, note="a\nb")]))
    assert shown.endswith("act=tanh, cell=Path, loss=trial, layers=[1, 2], lr=0.0001, note=a b")


def test_a_notebook_shows_the_best_trials_first() -> None:
    page = result([*TRIALS, *(trial(number, -1.0) for number in range(7, 20))], run_dir=Path("/runs/a<b"))._repr_html_()
    assert page.index(">4<") < page.index(">6<") < page.index(">0<") < page.index(">2<")
    assert "and 10 more" in page
    assert "/runs/a&lt;b" in page
    assert "&lt;no&gt; way" in result()._repr_html_()


def test_trials_are_a_dataframe() -> None:
    frame = result().dataframe()
    assert list(frame.columns) == ["number", "lr", "momentum", "value", "state", "seconds", "slot", "error"]
    assert frame["momentum"].notna().tolist() == [number == 4 for number in range(7)]
    assert frame.loc[frame["value"].idxmax(), "number"] == 1


def test_without_pandas_a_dataframe_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LagomError, match="pip install pandas"):
        result().dataframe()
