"""Ablation studies from the call to the result, on slots; a plain loop over variants made by hand is the judge."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import AblationConfig, AblationStudy
from lagom.errors import LagomError
from tests.imported_once import imported_once  # noqa: F401

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
SET = TensorDataset(X, 2 * X[:, :1] + X[:, 1:2] ** 2)
NAMES = ("age", "fare", "noise")


class Net(nn.Module):
    """A network with BatchNorm, dropout and a block that keeps the width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8))
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        """Return numbers of shape (B, 1)."""
        return self.last(self.block(self.first(x)))


def train(module: Any, train_set: Any, hparams: Any) -> Any:
    """Return the loss after two epochs, as a dict with a tensor."""
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams["lr"])
    for _ in range(2):
        for x, y in DataLoader(train_set, 8, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return {"loss": nn.functional.mse_loss(model.eval()(train_set.tensors[0]), train_set.tensors[1])}


def by_hand(seed: int, change: Callable[[Any], None] | None = None, data: Any = SET) -> float:
    """Train a model that ``change`` has changed, in this process."""

    def make() -> nn.Module:
        model = Net()
        if change is not None:
            change(model)
        return model

    torch.manual_seed(seed)
    return float(train(make, data, {"lr": 0.01})["loss"])


def config(study: AblationStudy, **given: Any) -> AblationConfig:
    """Return a config for local slots."""
    fields: dict[str, Any] = {"module": Net, "train_set": SET, "hparams": {"lr": 0.01}, "launcher": "local"}
    fields |= {"optimization_key": "loss", "direction": "min", "num_slots": 2, "seeds": 2}
    return AblationConfig(ablation_study=study, **fields | given)


def without_block(model: Any) -> None:
    """Leave out the block."""
    model.block = nn.Identity()


def narrow(model: Any) -> None:
    """Put a layer without activation in the block's place, without drawing numbers of the program's."""
    with torch.random.fork_rng(devices=[]):
        model.block = nn.Linear(8, 8)


@pytest.fixture
def expected() -> dict[str, list[float]]:
    """The metrics of the variants, made by hand."""
    constant = X.clone()
    constant[:, 0] = 0
    return {
        "": [by_hand(seed) for seed in (0, 1)],
        "feature age": [by_hand(seed, data=TensorDataset(constant, SET.tensors[1])) for seed in (0, 1)],
        "layer block": [by_hand(seed, without_block) for seed in (0, 1)],
        "layers block.2 + first.1": [by_hand(seed, _without_both) for seed in (0, 1)],
    }


def _without_both(model: Any) -> None:
    model.block[2], model.first[1] = nn.Identity(), nn.Identity()


def a_study() -> AblationStudy:
    """Leave out a feature, a block, and two layers together."""
    study = AblationStudy(feature_names=NAMES)
    study.features.include("age")
    study.model.layers.include("block")
    study.model.layers.include_groups(["block.2", "first.1"])
    return study


def values(result: Any) -> dict[str, list[float]]:
    """Return the metrics of all trials by component, in the order of the seeds."""
    found: dict[str, list[float]] = {}
    for trial in result.trials:
        found.setdefault(trial["params"]["without"], []).append(trial["value"])
    return found


@pytest.fixture(scope="module")
def studied() -> Any:
    """The result of the study."""
    return experiment.lagom(train, config(a_study(), name="housing"))


def test_variants_are_those_made_by_hand_bit_for_bit(studied: Any, expected: dict[str, list[float]]) -> None:
    result = studied
    assert values(result) == expected
    assert result.base_value == statistics.fmean(expected[""])
    for effect in result.effects:
        differences = [one - base for one, base in zip(expected[effect["component"]], expected[""], strict=True)]
        assert effect["difference"] == statistics.fmean(differences)
        assert effect["low"] < effect["difference"] < effect["high"]
        assert effect["value"] == statistics.fmean(expected[effect["component"]])
    assert [effect["component"] for effect in result.effects] == list(expected)[1:]
    assert {trial["slot"] for trial in result.trials} == {0, 1}


@pytest.mark.soak
def test_a_trial_of_two_ranks_gives_the_same(expected: dict[str, list[float]]) -> None:
    result = experiment.lagom(train, config(a_study(), num_slots=1, ranks_per_trial=2))
    for name, found in values(result).items():
        assert found == pytest.approx(expected[name], rel=1e-4)


def test_the_process_itself_runs_a_study_and_gets_its_class_back() -> None:
    study = AblationStudy()
    study.model.layers.include("block", replacement=lambda layer: nn.Linear(8, 8))
    torch.manual_seed(4)
    state = torch.get_rng_state()
    result = experiment.lagom(train, config(study, launcher="inline", num_slots=None, seeds=1))
    torch.set_rng_state(state)
    base = float(train(Net, SET, {"lr": 0.01})["loss"])
    assert result.trials[0]["value"] == base
    assert result.trials[1]["value"] != base
    assert [type(layer) for layer in Net().block] == [nn.Linear, nn.ReLU, nn.Dropout]
    assert "one seed: the differences have no confidence interval" in repr(result)
    assert result.effects[0]["low"] is None


def test_a_layer_that_cannot_pass_its_input_on_is_a_failure_that_says_so() -> None:
    study = AblationStudy()
    study.model.layers.include("first", "last", "block")
    result = experiment.lagom(train, config(study, num_slots=1, max_failed_trials=2))
    states = [(trial["params"]["without"], trial["params"]["seed"], trial["state"]) for trial in result.trials]
    assert states == [
        ("", 0, "complete"),
        ("", 1, "complete"),
        ("layer first", 0, "failed"),  # and not with another seed
        ("layer last", 0, "failed"),
        ("layer block", 0, "complete"),
        ("layer block", 1, "complete"),
    ]
    assert "last (Linear) cannot be left out" in result.trials[3]["error"]
    assert "replacement=" in result.trials[3]["error"]
    assert "in train\n" in result.trials[3]["traceback"]
    assert "pass_through.py" not in result.trials[3]["traceback"]  # the program's frames alone
    assert result.effects[1]["difference"] is None
    assert "layer last: AblationError" in repr(result)


def test_an_unknown_layer_starts_nothing(tmp_path: Path) -> None:
    study = AblationStudy()
    study.model.layers.include("blok")
    with pytest.raises(ValueError, match=r"Net has no layer 'blok'; did you mean 'block'\?"):
        experiment.lagom(train, config(study, run_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak  # test_ablation_trials.py has a study that goes on
def test_a_study_is_kept_and_goes_on_in_its_folder(tmp_path: Path, expected: dict[str, list[float]]) -> None:
    asked = config(a_study(), run_dir=tmp_path, timeout_s=1e-9)
    nothing = experiment.lagom(train, asked)
    assert nothing.trials == []
    with pytest.raises(LagomError, match="no trial of the base"):
        _ = nothing.base_value
    result = experiment.lagom(train, config(a_study(), run_dir=tmp_path, resume=nothing.run_dir))
    assert result.run_dir == nothing.run_dir
    assert values(result) == expected
    again = experiment.lagom(train, config(a_study(), run_dir=tmp_path, resume=result.run_dir))
    assert again.trials == result.trials


def test_the_files_of_the_base_are_put_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(module: Any) -> float:
        model = module()
        torch.save(sorted(model.state_dict()), "names.pt")
        return float(len(model.state_dict()))

    study = AblationStudy()
    study.model.layers.include("block")
    monkeypatch.chdir(tmp_path)
    result = experiment.lagom(save, config(study, seeds=1))
    assert torch.load("names.pt") == sorted(Net().state_dict())
    assert [trial["value"] for trial in result.trials] == [10, 8]


def test_the_result_is_shown_with_its_most_useful_component_first(studied: Any) -> None:
    result, shown = studied, repr(studied)
    worst = max(result.effects, key=lambda effect: effect["difference"])
    assert shown.startswith("Ablation study of housing on this machine")
    assert shown.splitlines()[4].split("  ")[1] == worst["component"]
    assert "8 complete" in shown
    page = result._repr_html_()
    chart = ElementTree.fromstring(result.chart())
    assert result.chart() in page
    assert len(list(chart.iter("{http://www.w3.org/2000/svg}rect"))) == 3
    assert all(effect["component"] in page for effect in result.effects)


def test_a_base_that_fails_ends_the_study_with_its_error_or_shows_it() -> None:
    def broken(module: Any) -> float:
        raise KeyError("no such column")

    study = AblationStudy()
    study.model.layers.include("block")
    with pytest.raises(KeyError, match="no such column"):
        experiment.lagom(broken, config(study, max_failed_trials=2, num_slots=1))
    result = experiment.lagom(broken, config(study, max_failed_trials=None))
    assert [trial["state"] for trial in result.trials] == ["failed"] * 4
    assert "base: KeyError" in repr(result)
    with pytest.raises(LagomError, match="no trial of the base has run to its end: KeyError"):
        _ = result.base_value
