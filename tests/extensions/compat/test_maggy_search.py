"""Maggy's searches run as they are: both spellings of the config, and the arguments of releases before 1.0."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lagom import config as lagom_config
from lagom import experiment as lagom_experiment
from lagom.errors import LagomError
from lagom.extensions.compat import maggy
from tests.imported_once import imported_once  # noqa: F401

POINTS = torch.rand((60, 2), generator=torch.Generator().manual_seed(1))
SET = TensorDataset(POINTS, POINTS.sum(dim=1))


@pytest.fixture(autouse=True)
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import maggy`` works during each test; programs write into an empty folder."""
    monkeypatch.chdir(tmp_path)
    maggy.install()
    yield
    maggy.remove()


class Net(torch.nn.Module):
    """Maps points of shape (B, 2) to numbers of shape (B,)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, units), torch.nn.ReLU(), torch.nn.Linear(units, 1))

    def forward(self, points: Any) -> Any:
        """Return numbers of shape (B,)."""
        return self.layers(points).squeeze(1)


def fit(model: Any, dataset: Any, hparams: Any, reporter: Any) -> Any:
    """Trains a model of Maggy's later spelling, and returns its accuracy."""
    train_set, test_set = dataset
    net = model(hparams["units"])
    optimizer = torch.optim.SGD(net.parameters(), lr=hparams["lr"])
    for epoch in range(2):
        for points, values in torch.utils.data.DataLoader(train_set, batch_size=20):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(points), values).backward()
            optimizer.step()
        points, values = test_set.tensors
        accuracy = ((net(points) - values).abs() < 0.2).float().mean().item()
        reporter.broadcast(metric=accuracy, step=epoch)
    return accuracy


def test_a_search_in_the_later_spelling() -> None:
    from maggy import Searchspace, experiment
    from maggy.config import HyperparameterOptConfig

    space = Searchspace(units=("INTEGER", [2, 8]))
    space.add("lr", ("DISCRETE", [0.001, 0.1]))
    config = HyperparameterOptConfig(
        num_trials=4, optimizer="randomsearch", searchspace=space, direction="max", model=Net, dataset=[SET, SET]
    )
    config.seed = 3
    result = experiment.lagom(train_fn=fit, config=config)
    assert result["num_trials"] == 4
    assert result["best_val"] == max(result["metric_list"])
    best = result["best_config"]
    assert best.keys() == {"units", "lr"}
    again = lagom_config.TorchDistributedConfig(hparams=best, launcher="inline", run_dir=None, seed=3)
    alone = lagom_experiment.lagom(lambda hparams, reporter: fit(Net, [SET, SET], hparams, reporter), again)
    assert alone.value == result["best_val"]


def test_a_search_in_the_earlier_spelling_by_position() -> None:
    from maggy import experiment
    from maggy.experiment_config import OptimizationConfig
    from maggy.searchspace import Searchspace

    def train(model: Any, train_set: Any, test_set: Any, hparams: Any) -> Any:
        assert (train_set, test_set) == ("train", "test")
        return {"Metric": abs(hparams["x"]), "units": model(2).layers[0].out_features}

    config = OptimizationConfig(
        *(9, "gridsearch", Searchspace(x=("DISCRETE", [-3, -1, 2])), "Metric", "min", 1, 5, "none", "grid", "", 1),
        *(Net, "train", "test"),
    )
    result = experiment.lagom(train, config)
    assert (result["best_config"], result["best_val"], result["worst_val"], result["num_trials"]) == (
        {"x": -1},
        1,
        3,
        3,
    )


def test_the_arguments_of_releases_before_1_0() -> None:
    from maggy import Searchspace, experiment

    def training_function(kernel: int, dropout: float, reporter: Any) -> float:
        reporter.broadcast(metric=dropout)
        return kernel + dropout

    result = experiment.lagom(
        training_function,
        name="MNIST",
        experiment_type="optimization",
        searchspace=Searchspace(kernel=("INTEGER", [2, 8]), dropout=("DOUBLE", [0.01, 0.99])),
        optimizer="randomsearch",
        direction="max",
        num_trials=3,
        es_policy="none",
    )
    assert result["num_trials"] == 3
    assert result["best_val"] == pytest.approx(sum(result["best_config"].values()))


def test_what_the_config_has_not_got_is_none_and_a_hyperparameter_may_have_its_name() -> None:
    from maggy import Searchspace, experiment
    from maggy.config import HyperparameterOptConfig

    def train(model: Any, dataset: Any, hparams: Any) -> float:
        assert dataset is None
        return {"wide": 2.0, "deep": 1.0}[model]

    space = Searchspace(model=("CATEGORICAL", ["wide", "deep"]))
    config = HyperparameterOptConfig(num_trials=2, optimizer="gridsearch", searchspace=space, es_policy="none")
    assert experiment.lagom(train, config)["best_config"] == {"model": "wide"}


def test_fields_are_maggys() -> None:
    from maggy import Searchspace
    from maggy.config import HyperparameterOptConfig
    from maggy.config.hyperparameter_optimization import HyperparameterOptConfig as Same

    assert Same is HyperparameterOptConfig
    space = Searchspace(x=("DOUBLE", [0, 1]))
    config = HyperparameterOptConfig(5, "tpe", space, dataset=["one"])
    assert (config.name, config.es_min, config.sets, config.model) == ("HPOptimization", 10, ["one"], None)
    with pytest.raises(ValueError, match="num_trials is 0"):
        config.num_trials = 0
    assert config.num_trials == 5
    with pytest.raises(TypeError, match="'optimizer' twice"):
        HyperparameterOptConfig(5, "tpe", space, optimizer="gp")
    with pytest.raises(TypeError, match="takes 14 by position, not 15"):
        HyperparameterOptConfig(*range(15))
    with pytest.raises(TypeError, match="has no field 'trials'"):
        HyperparameterOptConfig(trials=5)


def test_the_command_lines_ranks_are_trials_at_a_time() -> None:
    from maggy import Searchspace
    from maggy.config import HyperparameterOptConfig

    config = HyperparameterOptConfig(5, "tpe", Searchspace(x=("DOUBLE", [0, 1])), "loss", dataset=["one"])
    found = config.with_defaults({"world_size": 3, "seed": 5, "launcher": "inline"})
    assert (found.num_slots, found.seed, found.launcher, found.sets) == (3, 5, "inline", ["one"])
    assert (found.world_size, found.optimization_key) == (None, "loss")
    assert (found.direction, found.es_policy) == ("max", "median")  # Maggy's, also for a loss
    by_position = HyperparameterOptConfig(5, "tpe", Searchspace(x=("DOUBLE", [0, 1])), "loss", "min")
    assert by_position.direction == "min"


def test_algorithms_of_ones_own_are_named_as_optunas() -> None:
    for name, instead in (("optimizer", "optimizer='random'"), ("earlystop", "es_policy"), ("pruner", "Optuna")):
        with pytest.raises(ImportError, match=instead):
            importlib.import_module(f"maggy.{name}")


@pytest.mark.soak  # tests/extensions/search/test_search.py shows it by default
def test_a_dict_without_the_metric_ends_the_search() -> None:
    from maggy import Searchspace, experiment
    from maggy.config import HyperparameterOptConfig

    config = HyperparameterOptConfig(5, "random", Searchspace(x=("DOUBLE", [0, 1])), "accuracy")
    with pytest.raises(LagomError, match="'accuracy'"):
        experiment.lagom(lambda x: {"loss": x}, config)
