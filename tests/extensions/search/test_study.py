"""``Study``: its trials are those of a plain ``optuna.Study.optimize``."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.extensions.search.study import Study
from lagom.extensions.search.trial_source import State, TrialOutcome, TrialSpec
from tests.extensions.search.searching import LISTS, SPACE, losses, run, search, small

Plain = Callable[[optuna.Trial], Mapping[str, Any]]


def plain(trial: optuna.Trial) -> dict[str, Any]:
    """Suggests from SPACE, as a program of Optuna's does."""
    return {
        "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        "momentum": trial.suggest_float("momentum", 0, 1),
        "units": trial.suggest_int("units", 32, 512),
        "depth": trial.suggest_categorical("depth", [1, 2, 4]),
        "act": trial.suggest_categorical("act", ["relu", "tanh"]),
    }


def plain_lists(trial: optuna.Trial) -> dict[str, Any]:
    """Suggests from LISTS."""
    return {
        "depth": trial.suggest_categorical("depth", [1, 2, 4]),
        "units": trial.suggest_int("units", 3, 6),
        "act": trial.suggest_categorical("act", ["relu", "tanh"]),
    }


def conditional(trial: optuna.Trial) -> dict[str, Any]:
    """Suggests momentum for one of two optimizers alone."""
    found: dict[str, Any] = {"optimizer": trial.suggest_categorical("optimizer", ["sgd", "adam"])}
    if found["optimizer"] == "sgd":
        found["momentum"] = trial.suggest_float("momentum", 0, 1)
    return found


def by_optuna(suggest: Plain, direction: str, num_trials: int | None, **algorithms: Any) -> optuna.Study:
    """Search by Optuna's own loop."""

    def objective(trial: optuna.Trial) -> float:
        curve = losses(suggest(trial))
        for step, value in enumerate(curve[:4]):
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return curve[4]

    optuna.logging.disable_default_handler()
    try:
        study = optuna.create_study(direction=direction, study_name="search", **algorithms)  # type: ignore[arg-type]
        study.optimize(objective, num_trials)
    finally:
        optuna.logging.enable_default_handler()
    return study


def same(study: optuna.Study | None, wanted: optuna.Study) -> None:
    """Trials are equal bit for bit, in all that Optuna keeps of them."""
    assert study is not None
    pairs = zip(study.trials, wanted.trials, strict=True)
    for found, other in pairs:
        assert (found.number, found.params, found.value, found.state) == (
            other.number,
            other.params,
            other.value,
            other.state,
        )
        assert found.intermediate_values == other.intermediate_values
        assert found.distributions == other.distributions


GRID: dict[str, Sequence[Any]] = {"depth": [1, 2, 4], "units": [3, 4, 5, 6], "act": ["relu", "tanh"]}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: optuna.samplers.RandomSampler(seed=7),
    "asha": lambda: optuna.samplers.RandomSampler(seed=7),
    "tpe": lambda: optuna.samplers.TPESampler(seed=7),
    "hyperband": lambda: optuna.samplers.TPESampler(seed=7),
    "gp": lambda: optuna.samplers.GPSampler(seed=7),
    "grid": lambda: optuna.samplers.GridSampler(GRID, seed=7),
}
NONE, MEDIAN = optuna.pruners.NopPruner, functools.partial(optuna.pruners.MedianPruner, n_startup_trials=10)
ASHA, HYPERBAND = optuna.pruners.SuccessiveHalvingPruner, optuna.pruners.HyperbandPruner


@pytest.mark.parametrize("direction", ["minimize", pytest.param("maximize", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("optimizer", "es_policy", "pruner", "num_trials"),
    [
        ("random", "median", MEDIAN, 40),
        ("random", "asha", ASHA, 40),
        ("asha", "median", ASHA, 40),
        ("tpe", "none", NONE, 30),
        ("tpe", "median", MEDIAN, 30),
        ("hyperband", "median", HYPERBAND, 30),
        ("gp", "none", NONE, 12),
        ("grid", "median", MEDIAN, None),
    ],
)
def test_with_one_slot_the_trials_are_those_of_optimize(
    optimizer: str, es_policy: str, pruner: Callable[[], Any], num_trials: int | None, direction: str
) -> None:
    space, suggest = (LISTS, plain_lists) if optimizer == "grid" else (SPACE, plain)
    config = HyperparameterOptConfig(
        searchspace=space,
        optimizer=optimizer,
        es_policy=es_policy,
        num_trials=num_trials,
        direction=direction,  # type: ignore[arg-type]  # Optuna's word
        seed=7,
    )
    wanted = by_optuna(suggest, direction, num_trials, sampler=SAMPLERS[optimizer](), pruner=pruner())
    assert {each.state.name for each in wanted.trials} >= {"COMPLETE", "FAIL"} - (
        {"FAIL"} if optimizer == "grid" else set()
    )
    assert es_policy == "none" or any(each.state.name == "PRUNED" for each in wanted.trials)
    same(search(config).optuna, wanted)


ENDS: tuple[State, ...] = ("complete", "complete", "complete", "pruned", "failed")


@pytest.mark.parametrize("direction", [pytest.param("min", marks=pytest.mark.soak), "max"])  # the test above minimizes
def test_tpe_with_many_running_trials_draws_what_optuna_draws(direction: Literal["min", "max"]) -> None:
    config = HyperparameterOptConfig(
        searchspace=SPACE, optimizer="tpe", es_policy="none", num_trials=60, direction=direction, seed=7
    )
    found = Study(config)
    wanted = optuna.create_study(direction="minimize" if direction == "min" else "maximize", sampler=SAMPLERS["tpe"]())
    running: list[tuple[TrialSpec, optuna.Trial]] = []
    for turn in range(60):
        spec, trial = found.ask(), wanted.ask()
        assert spec is not None
        assert spec.params == plain(trial)
        running.append((spec, trial))
        if len(running) < 9:
            continue
        spec, trial = running.pop(turn % 7)  # not in the order in which they began
        value = losses(spec.params)[4]
        state = "failed" if math.isnan(value) else ENDS[turn % len(ENDS)]
        if state == "pruned":
            found.report(spec.number, turn % 3, value)
            trial.report(value, turn % 3)
        found.tell(spec.number, TrialOutcome(state=state, value=value))
        ended = {"pruned": optuna.trial.TrialState.PRUNED, "failed": optuna.trial.TrialState.FAIL}.get(state)
        wanted.tell(trial, None if ended else value, ended)
    assert {each["state"] for each in found.trials()} == {"complete", "pruned", "failed"}


@pytest.mark.parametrize(
    ("optimizer", "launcher", "num_trials"),
    [
        ("random", "inline", 20),
        ("grid", "inline", None),
        ("tpe", "inline", 20),
        ("gp", "inline", 12),
        pytest.param("tpe", "local", 15, marks=pytest.mark.soak),
    ],
)
def test_a_whole_search_with_one_slot_is_optimize(optimizer: str, launcher: Any, num_trials: int | None) -> None:
    def train(hparams: dict[str, Any], reporter: Any) -> float:
        curve = losses(hparams)
        for step, value in enumerate(curve[:4]):
            reporter.broadcast(value, step)
        return curve[4]

    config = HyperparameterOptConfig(
        searchspace=LISTS if optimizer == "grid" else SPACE,
        optimizer=optimizer,
        num_trials=num_trials,
        direction="min",
        es_policy="median",
        seed=7,
        num_slots=1,
        launcher=launcher,
        run_dir=None,
    )
    suggest = plain_lists if optimizer == "grid" else plain
    wanted = by_optuna(suggest, "minimize", num_trials, sampler=SAMPLERS[optimizer](), pruner=MEDIAN())
    same(experiment.lagom(train, config).study, wanted)


def test_objects_of_optuna_are_used_as_they_are() -> None:
    space = {
        "lr": FloatDistribution(1e-5, 1e-1, log=True),
        "momentum": FloatDistribution(0, 1),
        "units": IntDistribution(32, 512),
        "depth": CategoricalDistribution([1, 2, 4]),
        "act": CategoricalDistribution(["relu", "tanh"]),
    }
    sampler, pruner = optuna.samplers.TPESampler(seed=1, multivariate=True), optuna.pruners.ThresholdPruner(upper=3)
    config = small(searchspace=space, optimizer=sampler, es_policy=pruner, num_trials=20, direction="min")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = optuna.samplers.TPESampler(seed=1, multivariate=True)
    wanted = by_optuna(plain, "minimize", 20, sampler=other, pruner=optuna.pruners.ThresholdPruner(upper=3))
    same(search(config).optuna, wanted)


def test_a_function_of_a_trial_is_a_conditional_space() -> None:
    study = search(small(searchspace=conditional, num_trials=20))
    wanted = by_optuna(conditional, "maximize", 20, sampler=optuna.samplers.RandomSampler(seed=3), pruner=MEDIAN())
    same(study.optuna, wanted)
    assert {len(each["params"]) for each in study.trials()} == {1, 2}
    assert all(("momentum" in each["params"]) == (each["params"]["optimizer"] == "sgd") for each in study.trials())


def test_what_the_function_returns_are_the_hparams() -> None:
    def layers(trial: optuna.Trial) -> dict[str, Any]:
        assert trial.study is not None  # which a trial has while it is asked for
        return {"layers": [2 ** trial.suggest_int("power", 1, 5)] * trial.suggest_int("depth", 1, 3)}

    study = Study(small(searchspace=layers))
    spec = study.ask()
    assert spec is not None
    suggested = study.optuna.trials[0].params
    assert spec.params == {"layers": [2 ** suggested["power"]] * suggested["depth"]}
    study.tell(spec.number, TrialOutcome(state="complete", value=1.0))
    assert study.trials()[0]["params"] == spec.params


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (lambda trial: 3, "returned a int; want a dict"),
        (lambda trial: {1: trial.suggest_int("x", 0, 1)}, "the key 1"),
        (lambda trial: None, "suggested nothing"),
        (lambda trial: {"shared": trial.suggest_int("x", 0, 1)}, "'shared' is in hparams and in searchspace"),
    ],
)
def test_a_function_that_gives_no_hparams_is_an_error(space: Any, said: str) -> None:
    study = Study(small(searchspace=space, hparams={"shared": 1}))
    with pytest.raises(ValueError, match=said):
        study.ask()
    assert [each["state"] for each in study.trials()] == ["failed"]


def test_a_grid_knows_its_own_trials_without_going_through_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[object]()
    monkeypatch.setattr(optuna.samplers.GridSampler, "_grid_value_equal", lambda *values: compared.append(values))
    study = search(small(searchspace=LISTS, optimizer="grid", num_trials=None))
    assert study.finished
    assert not compared


def test_a_grid_is_tried_once_with_many_slots_too() -> None:
    study = Study(small(searchspace=LISTS, optimizer="grid", num_trials=None))
    running: list[TrialSpec] = []
    done = 0
    while not study.finished or running:
        while len(running) < 5 and (spec := study.ask()) is not None:
            running.append(spec)
        run(study, running.pop(len(running) // 2))
        done += 1
    assert done == len(study.trials()) == 24
    assert len({tuple(each["params"].values()) for each in study.trials()}) == 24
    assert len(search(small(searchspace=LISTS, optimizer="grid", num_trials=7)).trials()) == 7
    stepped = {"x": FloatDistribution(0, 1, step=0.25), "y": IntDistribution(2, 6, step=2)}
    found = {
        (each["params"]["x"], each["params"]["y"])
        for each in search(small(searchspace=stepped, optimizer="grid", num_trials=None, es_policy="none")).trials()
    }
    assert found == {(x / 4, y) for x in range(5) for y in (2, 4, 6)}


def test_a_sampler_that_has_tried_everything_ends_the_search() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.BruteForceSampler()
    config = small(searchspace=LISTS, optimizer=sampler, num_trials=100, es_policy="none")
    assert len(search(config).trials()) == 24


def test_choices_are_any_objects() -> None:
    def square(x: float) -> float:
        return x * x

    objects = [square, math.sqrt, None, 1, True, "1", math.nan, [1, 2], {"a": 1}, int, 1e-3]
    study = Study(small(searchspace=Searchspace(what=("CATEGORICAL", objects)), optimizer="grid", num_trials=None))
    while (spec := study.ask()) is not None:
        study.tell(spec.number, TrialOutcome(state="complete", value=1.0))
    found = [each["params"]["what"] for each in study.trials()]
    assert all(any(each is other for other in found) for each in objects)
    assert len(found) == len(objects)
    assert "square" in study.optuna.trials_dataframe()["params_what"].tolist()


@pytest.mark.parametrize(
    ("fields", "is_told"),
    [({"es_policy": "median"}, True), ({}, False), ({"es_policy": "median", "num_trials": 4}, False)],
)
def test_a_first_trial_that_reports_nothing_is_told_of_once(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any], is_told: bool
) -> None:
    study = Study(small(**{"num_trials": 20} | fields))
    for _ in range(3):
        spec = study.ask()
        assert spec is not None
        study.tell(spec.number, TrialOutcome(state="complete", value=1.0))
    text = (
        "trial 0 reported no value of 'Metric' before its end, so it counts for no early stopping; if the function "
        "logs a metric, name it as optimization_key"
    )
    assert [one.getMessage() for one in caplog.records] == [text] * is_told


def test_a_trial_that_reports_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    search(small(num_trials=20))
    assert caplog.records == []
