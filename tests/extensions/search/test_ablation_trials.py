"""Ablation studies: their trials, their checks before anything starts, and what they find."""

from __future__ import annotations

import functools
import inspect
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.config import AblationConfig, AblationStudy
from lagom.driver.preparation import checked
from lagom.errors import AblationError, LagomError
from lagom.extensions.search.ablation_trials import AblationTrials
from lagom.extensions.search.trial_source import TrialOutcome
from lagom.extensions.search.variants import variants
from lagom.program.signature import Call

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))
SET = TensorDataset(X, X.sum(1, keepdim=True) + X[:, :1])


class Net(nn.Module):
    """Two blocks of equal width."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(3, width), nn.Sequential(nn.Linear(width, width), nn.Tanh()))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Any) -> Any:
        """Return numbers of shape (B, 1)."""
        return self.head(self.drop(self.blocks(x)))


def train(module: Any, train_set: Any) -> float:
    """Return the loss after an epoch."""
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(train_set, 8, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def by_hand(seed: int, change: Callable[[nn.Module], None] = lambda model: None, data: Any = SET) -> float:
    """Train as ``train`` does, with a model that ``change`` has changed."""

    def make() -> nn.Module:
        model = Net()
        change(model)
        return model

    torch.manual_seed(seed)
    return train(make, data)


def config(*layers: str, function: Any = None, **given: Any) -> AblationConfig:
    """Return a config that leaves out ``layers``."""
    study = given.pop("study", None) or AblationStudy()
    study.model.layers.include(*layers)
    fields: dict[str, Any] = {"module": Net, "train_set": SET, "ablation_study": study, "direction": "min"}
    return AblationConfig(**fields | given)


def trials(asked: AblationConfig, function: Any = train, folder: Path | None = None) -> AblationTrials:
    """Return the trials of ``asked``."""
    found = variants(asked.ablation_study, function, provided(asked, function))
    return AblationTrials(found, asked.seed_values, folder)


def provided(asked: AblationConfig, function: Any) -> dict[str, Any]:
    """Return what ``asked`` provides for ``function``."""
    extra = asked.extra_arguments()
    return checked(function, asked.of_a_trial(), extra) | extra


def run(asked: AblationConfig, function: Any = train, folder: Path | None = None, most: int = 100) -> AblationTrials:
    """Run the trials of ``asked`` in this process, one after another; stop after ``most``."""
    source = trials(asked, function, folder)
    call = Call(function=function, provided=provided(asked, function))
    while most and (spec := source.ask()) is not None:
        most -= 1
        own = spec.change(call)
        if own.random_states is not None:
            torch.set_rng_state(own.random_states["torch"])
        given = {**own.provided["hparams"], **own.provided}
        try:
            value = own.function(**{name: given[name] for name in inspect.signature(own.function).parameters})
        except AblationError as error:
            source.tell(spec.number, TrialOutcome(state="failed", error=f"AblationError: {error}"))
        else:
            source.tell(spec.number, TrialOutcome(state="complete", value=value))
    return source


def test_the_base_comes_first_and_each_variant_has_each_seed() -> None:
    study = AblationStudy(feature_names=["a", "b", "c"])
    study.features.include("b")
    study.model.layers.include_groups(["drop", "blocks.1"])
    source = run(config("blocks.*", study=study, seeds=[5, 9]))
    rows = source.trials()
    assert [(row["params"]["without"], row["params"]["seed"]) for row in rows] == [
        (name, seed)
        for name in ("", "feature b", "layer blocks.0", "layer blocks.1", "layers drop + blocks.1")
        for seed in (5, 9)
    ]
    without_b = X.clone()
    without_b[:, 1] = 0

    def no_block(model: Any) -> None:
        model.blocks[1] = nn.Identity()

    def neither(model: Any) -> None:
        model.blocks[1], model.drop = nn.Identity(), nn.Identity()

    def no_first(model: Any) -> None:
        model.blocks[0] = nn.Identity()

    expected = [by_hand(5), by_hand(9)]
    expected += [by_hand(seed, data=TensorDataset(without_b, SET.tensors[1])) for seed in (5, 9)]
    expected += [by_hand(seed, change) for change in (no_first, no_block, neither) for seed in (5, 9)]
    assert [row["value"] for row in rows] == expected
    assert {row["state"] for row in rows} == {"complete"}
    assert source.finished
    differences = [expected[4] - expected[0], expected[5] - expected[1]]
    found = source.effects()[1]
    assert (found.component, found.num_seeds) == ("layer blocks.0", 2)
    assert found.difference == statistics.fmean(differences)
    half = 12.706204736 * statistics.stdev(differences) / 2**0.5
    assert (found.low, found.high) == pytest.approx((found.difference - half, found.difference + half), rel=1e-9)
    assert not source.is_seed_ignored()


def test_a_factory_a_model_of_ones_own_and_a_replacement() -> None:
    study = AblationStudy()
    study.model.set_base_model_generator(lambda: Net(4))
    study.model.add_custom_model_generator(lambda: Net(8), "wide")
    study.model.layers.include("head", replacement=lambda layer: nn.Linear(layer.in_features, 1, bias=False))

    def count(module: Any) -> float:
        return float(sum(one.numel() for one in module().parameters()))

    rows = run(config(study=study, module=None, seeds=1), count).trials()
    assert {row["params"]["without"]: row["value"] for row in rows} == {"": 41, "layer head": 40, "model wide": 113}


def test_maggys_arguments_are_served() -> None:
    study = AblationStudy(
        "titanic", 1, "survived", dataset_generator=lambda size: {"age": X[:size, 0], "y": X[:size, 1]}
    )
    study.features.include("age")
    study.model.set_base_model_generator(Net)
    study.model.layers.include("drop")

    def train_fn(dataset_function: Any, model_function: Any) -> float:
        data = dataset_function(6)
        return float(data["age"].std()) + len(model_function().drop.extra_repr())

    rows = run(config(study=study, module=None, train_set=None, seeds=1), train_fn).trials()
    spread = float(X[:6, 0].std())
    assert [row["value"] for row in rows] == [spread + 20, 20, spread]


def test_a_generator_may_make_both_sets() -> None:
    def generate() -> Any:
        return [{"age": X[:, 0]}, {"age": X[:2, 0]}]

    def train_fn(dataset_function: Any) -> float:
        train_set, test_set = dataset_function()
        return float(train_set["age"].std() + test_set["age"].std() + (train_set["age"][0] - test_set["age"][0]).abs())

    study = AblationStudy(dataset_generator=generate)
    study.features.include("age")
    rows = run(config(study=study, module=None, train_set=None, seeds=1), train_fn).trials()
    assert rows[0]["value"] > 0
    assert rows[1]["value"] == 0


def test_the_functions_seed_is_the_trials() -> None:
    def seeded(module: Any, seed: int = 0) -> float:
        module()
        return float(seed)

    def through_hparams(module: Any, hparams: Any) -> float:
        module()
        return float(hparams.get("seed", -1))

    assert [row["value"] for row in run(config("drop", seeds=2, seed=4), seeded).trials()] == [4, 5, 4, 5]
    own = config("drop", seeds=2, hparams={"seed": 8})
    assert [row["value"] for row in run(own, through_hparams).trials()] == [0, 1, 0, 1]
    assert [row["value"] for row in run(config("drop", seeds=[3]), through_hparams).trials()] == [-1, -1]


def test_a_study_goes_on_from_its_journal(tmp_path: Path) -> None:
    pytest.importorskip("lagom.extensions.search.trial_journal")
    asked = config("drop", "head", seeds=2)
    first = run(asked, folder=tmp_path, most=3)
    assert not first.finished
    first.close()
    second = run(asked, folder=tmp_path)
    assert [row["number"] for row in second.trials()] == list(range(5))
    assert [row["state"] for row in second.trials()] == ["complete"] * 4 + ["failed"]
    assert "replacement=" in second.trials()[4]["error"]
    second.close()
    assert [row["value"] for row in second.trials()[:4]] == [row["value"] for row in run(asked).trials()[:4]]
    third = trials(asked, folder=tmp_path)  # tries what has failed again
    asked_for = [spec.number for _ in range(9) if (spec := third.ask()) is not None]
    third.close()
    assert asked_for == [4, 5]
    with pytest.raises(LagomError, match="resume with the same components and seeds"):
        trials(config("blocks.1", "head", seeds=2), folder=tmp_path)


def test_seeds_that_make_no_difference_are_noticed() -> None:
    def fixed(module: Any, train_set: Any) -> float:
        torch.manual_seed(0)
        return train(module, train_set)

    assert run(config("drop", seeds=2), fixed).is_seed_ignored()
    assert not run(config("drop", seeds=1), fixed).is_seed_ignored()


@pytest.mark.parametrize(
    ("given", "function", "message"),
    [
        ({}, train, "leaves out nothing: study.features.include"),
        ({"layers": ["blocks.3"]}, train, r"Net has no layer 'blocks.3'; did you mean 'blocks.1'\?"),
        ({"layers": ["block.*"]}, train, r"Net has no layer that the pattern 'block.\*' matches"),
        ({"layers": ["drop"], "module": None}, lambda train_set: 0.0, "by module="),
        ({"layers": ["drop"], "module": lambda: Net()}, lambda train_set: 0.0, "no parameter 'module'"),
        ({"features": ["age"]}, train, "no feature 'age'; name its columns"),
        ({"features": ["age"], "train_set": None}, lambda module: 0.0, "the config has no train_set"),
        ({"features": ["age"], "train_set": "s3://b"}, lambda train_set: 0.0, "the text 's3://b' for a data set"),
        (
            {"features": ["aeg"], "train_set": pd.DataFrame({"age": [1]})},
            lambda train_set: 0.0,
            r"did you mean 'age'\?",
        ),
        ({"features": ["aeg"], "train_set": [{"age": 1}]}, train, r"did you mean 'age'\?"),
        ({"layers": ["a.*"], "module": lambda width: Net(width)}, train, "the layers of <lambda> are not known"),
    ],
)
def test_a_study_that_cannot_work_is_an_error_before_anything_starts(given: Any, function: Any, message: str) -> None:
    study = AblationStudy()
    study.features.include(given.pop("features", []))
    layers = given.pop("layers", [])
    with pytest.raises(ValueError, match=message):
        trials(config(*layers, study=study, **given), function)


def test_two_variants_of_one_name_are_an_error_unless_they_are_the_same() -> None:
    study = AblationStudy()
    study.model.layers.include("blocks.*", "blocks.0")
    source = trials(config(study=study, seeds=1))
    found = [spec.params["without"] for _ in range(9) if (spec := source.ask())]
    assert found == ["", "layer blocks.0", "layer blocks.1"]
    study.model.layers.include("blocks.1", replacement=lambda layer: nn.Identity())
    with pytest.raises(ValueError, match=r"two variants that are called 'layer blocks\.1'"):
        trials(config(study=study))
    other = AblationStudy()
    for width in (4, 5):
        other.model.add_custom_model_generator(functools.partial(Net, width), "wide")
    with pytest.raises(ValueError, match=r"two variants that are called 'model wide'.*name each model differently"):
        trials(config(study=other))


def test_a_model_with_arguments_from_hparams_is_known(rng_untouched: None) -> None:
    def function(module: Any, hparams: Any) -> float:
        return 0.0

    asked = config("blocks.*", module=lambda width: Net(width), hparams={"width": 4}, seeds=1)
    source = trials(asked, function)
    assert [spec.params["without"] for _ in range(3) if (spec := source.ask())] == [
        "",
        "layer blocks.0",
        "layer blocks.1",
    ]
    with pytest.raises(ValueError, match="did you mean 'drop'"):
        trials(config("dropp", module=lambda width: Net(width), hparams={"width": 4}), function)


def test_a_prefix_is_one_group_of_the_outermost_layers() -> None:
    study = AblationStudy()
    study.model.layers.include_groups(prefix="blocks")
    source = trials(config(study=study, seeds=1))
    specs = [spec for _ in range(9) if (spec := source.ask()) is not None]
    assert [spec.params["without"] for spec in specs] == ["", "layers blocks..."]
    assert specs[1].change.layers == ("blocks",)  # type: ignore[attr-defined]
