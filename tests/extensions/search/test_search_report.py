"""The page about a search: its charts have every trial, and it can be read without a network."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution

from lagom import experiment
from lagom.config import AblationConfig, AblationStudy, HyperparameterOptConfig, Searchspace
from lagom.extensions.search.pages.axis import Axis
from lagom.extensions.search.search_result import SearchResult

SVG = "{http://www.w3.org/2000/svg}"


class Net(torch.nn.Sequential):
    """A network with a last layer that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


def num_parameters(module: Any) -> int:
    """Return a number that each layer changes."""
    return sum(one.numel() for one in module().parameters())


def trial(number: int, value: float | None, state: str = "complete", **facts: Any) -> dict[str, Any]:
    """Return a trial as a search has it, which ran for 2 s on one of two slots."""
    error = "ValueError: <no> way" if state == "failed" else ""
    times = {"seconds": 2.0, "started": 1e9 + number // 2 * 2, "slot": number % 2}
    rest = {"error": error, "traceback": "", "folder": None, "returned": None}
    return {"number": number, "params": {"lr": 0.1}, "value": value, "state": state, **times, **rest, **facts}


TRIALS = [
    trial(0, 0.5, params={"lr": 1e-5, "act": "<relu>"}),
    trial(1, 0.9, "pruned", params={"lr": 1e-1, "act": "tanh", "momentum": 0.5}),
    trial(2, 0.25, params={"lr": 1e-3, "act": None}),
    trial(3, None, "failed", params={"lr": 1e-2, "act": True}),
    trial(4, 0.75, params={"lr": 1e-4, "act": [1, 2]}),
]


def charts(trials: Sequence[dict[str, Any]], folder: Path, direction: str = "min", **facts: Any) -> dict[str, Any]:
    """Return the SVG elements of the report by title; check that it names nothing to be loaded."""
    result = SearchResult(trials, direction=direction, hparams={}, name="train", metric="a<b", **facts)
    page = result.report(folder / "page.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import", page)
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return {one.attrib["aria-label"]: one for one in found}


def texts(chart: Any) -> list[str]:
    """Return all texts that are seen."""
    return [one.text for one in chart.iter(f"{SVG}text")]


def test_every_trial_is_a_dot_and_the_best_so_far_a_line(tmp_path: Path) -> None:
    for direction, best in (("min", 0.25), ("max", 0.75)):
        found = charts(TRIALS, tmp_path, direction)
        for name in ("Best value over trials", "Best value over time"):
            chart = found[name]
            dots = [one for one in chart.iter() if one.find(f"{SVG}title") is not None]
            numbers = sorted(one.find(f"{SVG}title").text.partition(",")[0] for one in dots)
            assert numbers == [f"trial {number}" for number in range(5)]
            places = {
                int(re.findall(r"\d+", one.find(f"{SVG}title").text)[0]): float(one.attrib["cy"])
                for one in dots
                if "cy" in one.attrib
            }
            (line,) = chart.iter(f"{SVG}polyline")
            heights = [float(point.partition(",")[2]) for point in line.attrib["points"].split()]
            assert heights[0] == places[0]
            assert heights[-1] == places[{0.25: 2, 0.75: 4}[best]]
            assert {"complete", "stopped early (last value)", "failed", "best so far"} <= set(texts(chart))


def test_lines_go_through_all_hyperparameters(tmp_path: Path) -> None:
    chart = charts(TRIALS, tmp_path)["Hyperparameters of the trials that ran to their end"]
    lines = list(chart.iter(f"{SVG}polyline"))
    assert [len(one.attrib["points"].split()) for one in lines] == [3, 3, 3]
    assert {"lr", "act", "a<b", "<relu>", "None", "[1, 2]"} <= set(texts(chart))
    conditional = [
        trial(0, 1.0, params={"a": 1, "b": 2, "c": 3}),
        trial(1, 2.0, params={"a": 2, "c": 4}),
    ]
    chart = charts(conditional, tmp_path)["Hyperparameters of the trials that ran to their end"]
    assert sorted(len(one.attrib["points"].split()) for one in chart.iter(f"{SVG}polyline")) == [1, 2, 4]


def suggested(trial: Any) -> dict[str, Any]:
    """Return the hyperparameters of a trial, by the suggestions of Optuna."""
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True), "x": trial.suggest_float("x", 1.0, 2.0)}


@pytest.mark.parametrize(
    "space",
    [
        Searchspace(lr=("DOUBLE", [1e-4, 1e-1], "log"), x=("DOUBLE", [1, 2])),
        {"lr": FloatDistribution(1e-4, 1e-1, log=True), "x": FloatDistribution(1.0, 2.0)},
        suggested,
    ],
)
def test_hyperparameters_that_are_drawn_by_logarithms_are_shown_so(space: Any, tmp_path: Path) -> None:
    config = HyperparameterOptConfig(
        searchspace=space, num_trials=8, direction="min", optimizer="random", launcher="inline", run_dir=None, seed=1
    )
    result = experiment.lagom(lambda hparams: hparams["lr"] + hparams["x"], config)
    page = result.report(tmp_path / "page.html").read_text()
    title = "Hyperparameters of the trials that ran to their end"
    (text,) = (text for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if title in text)
    assert {"0.0001", "0.001", "0.01", "1.4"} <= set(texts(ElementTree.fromstring(text)))


def test_logarithmic_axes_have_room_for_all_values() -> None:
    axis = Axis.of_values([32, 512, 64], is_log=True)
    assert [mark for _, mark in axis.marks] == ["10", "100", "1000"]
    assert axis.place(100) == pytest.approx(0.5)
    assert Axis.of_values([0.1], is_log=True).place(0.1) == pytest.approx(0.0)
    assert not Axis.of_values([0, 1], is_log=True).is_log


def test_slots_have_their_trials_where_they_ran(tmp_path: Path) -> None:
    chart = charts(TRIALS, tmp_path)["Slots"]
    boxes = {one.find(f"{SVG}title").text.partition(",")[0]: one for one in chart.iter(f"{SVG}rect") if len(one)}
    assert len(boxes) == 5
    assert boxes["trial 0"].attrib["x"] == boxes["trial 1"].attrib["x"]
    assert boxes["trial 0"].attrib["y"] == boxes["trial 2"].attrib["y"] != boxes["trial 1"].attrib["y"]
    assert float(boxes["trial 2"].attrib["x"]) > float(boxes["trial 0"].attrib["x"])
    assert {"slot 0", "slot 1", "Slots, 83% busy", "100% busy", "67% busy", "6 s"} <= set(texts(chart))


def test_the_time_in_which_a_slot_prepares_a_trial_is_drawn_and_busy(tmp_path: Path) -> None:
    late = [one | ({"seconds": 0.5, "prepare_s": 1.5} if one["number"] == 2 else {}) for one in TRIALS]
    chart = charts(late, tmp_path)["Slots"]
    titles = [one.find(f"{SVG}title").text for one in chart.iter(f"{SVG}rect") if len(one)]
    assert [title for title in titles if "prepared for 1.5 s" in title and title.startswith("trial 2")]
    boxes = [one for one in chart.iter(f"{SVG}rect") if len(one) and "trial 2" in one.find(f"{SVG}title").text]
    pale, box = (float(one.attrib["x"]) for one in boxes)
    assert box > pale
    assert {"Slots, 83% busy", "100% busy", "67% busy"} <= set(texts(chart))


def test_the_time_between_a_search_and_its_resumption_is_left_out(tmp_path: Path) -> None:
    later = [one | {"started": one["started"] + 86400 * (one["number"] > 1)} for one in TRIALS]
    assert "4 s" in texts(charts(later, tmp_path)["Slots"])


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [trial(0, None, "failed")],
        [trial(0, 1.0)],
        [trial(0, math.inf), trial(1, -math.inf)],
        [trial(0, 0.0), trial(1, 0.0)],
        [trial(0, 1.0, seconds=None, started=None, slot=None)],
        [trial(n, 10.0**n, params={}) for n in range(3)],
        [trial(n, float(n), params={"x": float(n), "y": f"{n}"}) for n in range(500)],
    ],
)
def test_any_trials_are_a_page(trials: list[dict[str, Any]], tmp_path: Path) -> None:
    for chart in charts(trials, tmp_path).values():
        numbers = [float(text) for one in chart.iter() for key in ("x", "y", "cx", "cy") if (text := one.get(key))]
        assert all(-1 <= number <= 1100 for number in numbers)


@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("prunes", [False, True])
def test_what_makes_trials_bad_is_important_with_few_trials(direction: Any, prunes: bool, tmp_path: Path) -> None:
    sign = 1 if direction == "min" else -1
    bound: dict[str, Any] = {"upper" if sign > 0 else "lower": sign * 1.2}

    def train(lr: float, width: float, reporter: Any) -> float:
        value = sign * (max(0.0, -3 - math.log10(lr)) + (0.1 + width * 7919 % 1) / 10)
        if prunes:
            reporter.broadcast(value)
        return value

    result = experiment.lagom(
        train,
        HyperparameterOptConfig(
            searchspace=Searchspace(lr=("DOUBLE", [1e-5, 1e-1], "log"), width=("DOUBLE", [16, 512])),
            num_trials=20,
            optimizer="random",
            direction=direction,
            es_policy=optuna.pruners.ThresholdPruner(**bound) if prunes else "none",
            launcher="inline",
            run_dir=tmp_path / "runs",
            seed=2,
        ),
    )
    assert any(each["state"] == "pruned" for each in result.trials) is prunes
    assert result.importances["lr"] > 0.7
    assert "only a hint, since 20 trials are few" in result.report().read_text()


def test_the_report_of_a_search_and_of_an_ablation_study(tmp_path: Path) -> None:
    space = Searchspace(x=("DOUBLE", [-1, 1]), y=("DOUBLE", [-1, 1]))
    shared: Any = {"launcher": "inline", "run_dir": tmp_path / "runs", "seed": 1}
    config = HyperparameterOptConfig(
        searchspace=space, num_trials=40, direction="min", optimizer="random", optimization_key="error", **shared
    )
    result = experiment.lagom(lambda x, y: x**2 + y / 100, config)
    assert list(result.importances) == ["x", "y"]
    assert sum(result.importances.values()) == pytest.approx(1)
    assert "only a hint" not in result.report().read_text()
    page = result.report()
    assert result.run_dir is not None
    assert page == result.run_dir / "report.html"
    for text in ("40 complete", "Importance of hyperparameters", "slot 0", ">error<", "<summary>Settings</summary>"):
        assert text in page.read_text()
    study = AblationStudy()
    study.model.layers.include("last")
    ablation = AblationConfig(ablation_study=study, module=Net, direction="max", **shared)
    page = experiment.lagom(num_parameters, ablation).report()
    for text in ("What leaving out a component changes", "slot 0", "without"):
        assert text in page.read_text()


def test_without_a_folder_the_report_needs_a_path() -> None:
    with pytest.raises(ValueError, match=re.escape("report('page.html')")):
        SearchResult([], direction="min", hparams={}).report()
