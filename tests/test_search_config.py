"""``HyperparameterOptConfig`` and ``Searchspace``: what cannot be searched is refused when it is said."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.settings import field_texts

SPACE = Searchspace(lr=("DOUBLE", [1e-5, 1e-1], "log"), act=("CATEGORICAL", ["relu", "tanh"]))


@pytest.mark.parametrize(
    ("spec", "found", "wanted"),
    [
        (3, "x=3", '("DOUBLE", [0.1, 1])'),
        (("DOUBLE",), "('DOUBLE',)", "(type, values)"),
        (([0, 1], "DOUBLE"), "[0, 1]", "(type, values)"),
        (("FLOAT", [0, 1]), "'FLOAT'", "DOUBLE, INTEGER, DISCRETE, CATEGORICAL"),
        (("DOBLE", [0, 1]), "'DOBLE'", "did you mean 'DOUBLE'?"),
        (("DOUBLE", 3), "3", "want a list"),
        (("CATEGORICAL", "relu"), "'relu'", "want a list"),
        (("CATEGORICAL", []), "without values", "at least one"),
        (("DOUBLE", [1, 2, 3]), "3 values", '("DISCRETE", [1, 2, 3])'),
        (("DOUBLE", [2, 1]), "from 2.0 to 1.0", "less than"),
        (("INTEGER", [2, 2]), "from 2 to 2", "hparams"),
        (("INTEGER", [1.0, 2]), "1.0", "an int"),
        (("INTEGER", [True, 2]), "True", "an int"),
        (("DOUBLE", ["a", 2]), "'a'", "a number"),
        (("DOUBLE", ["0.1", "1"]), "'0.1'", "a number"),
        (("DOUBLE", [0, float("inf")]), "inf", "finite"),
        (("DOUBLE", [0, 1], "log"), "0.0", "above 0"),
        (("INTEGER", [-1, 1], "log"), "-1", "above 0"),
        (("DOUBLE", [1, 2], "exp"), "'exp'", '"log"'),
        (("DISCRETE", [1, 2], "log"), "listed", "DOUBLE and INTEGER"),
        (("DISCRETE", [1, "2"]), "'2'", '"CATEGORICAL"'),
        (("DISCRETE", [1, True]), "True", "numbers"),
        (("DISCRETE", [1, float("nan")]), "nan", "numbers"),
        (("CATEGORICAL", ["a", "b", "a"]), "'a'", "twice"),
    ],
)
def test_what_cannot_be_searched_is_refused(spec: Any, found: str, wanted: str) -> None:
    with pytest.raises(ValueError, match="x") as raised:
        Searchspace(x=spec)
    assert found in str(raised.value)
    assert wanted in str(raised.value)


def test_names_are_strings_and_there_once() -> None:
    space = Searchspace(lr=("double", (0, 1)))
    for name, said in ((1, "the name 1"), ("", "names are strings"), ("lr", "'lr' twice")):
        with pytest.raises(ValueError, match=said):
            space.add(name, ("DOUBLE", [0, 1]))  # type: ignore[arg-type]


def test_a_searchspace_is_read_as_in_maggy() -> None:
    space = Searchspace(kernel=("integer", (2, 8)))
    space.add("rate", ["Double", [1, 2.5]])
    space.add("pool", ("DISCRETE", np.array([1, 2])))
    space.add("what", ("CATEGORICAL", [None, int]))
    assert space.names() == {"kernel": "INTEGER", "rate": "DOUBLE", "pool": "DISCRETE", "what": "CATEGORICAL"}
    assert space.keys() == list(space.names())
    assert space.get("kernel") == space.kernel == [2, 8]
    assert (space.get("none"), space.get("none", 3)) == (None, 3)
    assert "pool" in space
    assert "none" not in space
    assert len(space) == 4
    assert list(space)[1] == {"name": "rate", "type": "DOUBLE", "values": [1.0, 2.5]}
    assert list(space.items()) == list(space)
    assert space.values()[2] == ("DISCRETE", [1, 2])
    assert [type(value) for value in space.pool] == [int, int]
    assert (
        str(space)
        == space.json()
        == (
            '{"kernel": ["INTEGER", [2, 8]], "pool": ["DISCRETE", [1, 2]], "rate": ["DOUBLE", [1.0, 2.5]], '
            '"what": ["CATEGORICAL", ["None", "int"]]}'
        )
    )
    with pytest.raises(AttributeError, match="no hyperparameter 'none'"):
        _ = space.none


def test_a_searchspace_is_made_again_from_its_dict_its_text_and_its_pickle() -> None:
    assert Searchspace(**SPACE.to_dict()) == SPACE
    assert eval(repr(SPACE)) == SPACE
    assert pickle.loads(pickle.dumps(SPACE)) == copy.deepcopy(SPACE) == SPACE
    assert Searchspace(lr=("DOUBLE", [1e-5, 1e-1])) != SPACE


@pytest.mark.parametrize(
    ("setting", "found", "wanted"),
    [
        ({"searchspace": None}, "None", 'Searchspace(lr=("DOUBLE", [1e-5, 1e-1], "log"))'),
        ({"searchspace": [1]}, "[1]", "function of a trial"),
        ({"searchspace": Searchspace}, "class", "a Searchspace"),
        ({"searchspace": Searchspace()}, "empty", "TorchDistributedConfig"),
        ({"searchspace": {}}, "empty", "TorchDistributedConfig"),
        ({"searchspace": {"lr": [0.1, 1]}}, "[0.1, 1]", "(type, values)"),
        (
            {"searchspace": {"lr": optuna.distributions.FloatDistribution(0, 1), "x": ("DOUBLE", [0, 1])}},
            "x=('DOUBLE', [0, 1])",
            "all of one kind",
        ),
        ({"hparams": {"lr": 1}}, "'lr' is in hparams and in searchspace", "drop one"),
        ({"num_trials": None}, "neither num_trials nor timeout_s", "num_trials=50"),
        ({"num_trials": 0}, "0", "at least 1"),
        ({"num_trials": True}, "True", "at least 1"),
        ({"num_trials": 1.5}, "1.5", "timeout_s"),
        ({"optimizer": "bayes"}, "'bayes'", "'random', 'grid', 'tpe', 'gp', 'asha', 'hyperband'"),
        ({"optimizer": "rndom"}, "'rndom'", "did you mean 'random'?"),
        ({"optimizer": None}, "None", "TPESampler(...)"),
        ({"optimizer": optuna.samplers.TPESampler}, "class", "TPESampler(...)"),
        ({"optimizer": "grid"}, "lr, a DOUBLE", '("DISCRETE", [1e-05, 0.1])'),
        ({"optimizer": "grid", "searchspace": lambda trial: None}, "no grid", "Searchspace"),
        ({"optimization_key": ""}, "''", "name of a metric"),
        ({"direction": "up"}, "'up'", "'max' or 'min'"),
        ({"direction": 1}, "1", "'max' or 'min'"),
        ({"es_policy": "mean"}, "'mean'", "'median', 'asha', 'none'"),
        ({"es_policy": optuna.pruners.MedianPruner}, "class", "MedianPruner(...)"),
        ({"optimizer": "asha", "es_policy": optuna.pruners.NopPruner()}, "own rule", "optimizer='random'"),
        ({"optimizer": "hyperband", "es_policy": optuna.pruners.NopPruner()}, "own rule", "optimizer='tpe'"),
        ({"es_interval": 0}, "0", "at least 1"),
        ({"es_min": -1}, "-1", "at least 0"),
        ({"num_slots": 0}, "0", "None for all"),
        ({"ranks_per_trial": None}, "None", "at least 1"),
        ({"ranks_per_trial": 2, "launcher": "inline"}, "ranks_per_trial=2", "one rank"),
        ({"max_failed_trials": 0}, "0", "None for any number"),
        ({"world_size": 2}, "world_size is 2", "ranks_per_trial=2"),
        ({"timeout_s": 0}, "0", "more than 0"),
        ({"trial_timeout_s": -1}, "-1", "more than 0"),
        ({"resume": 3}, "3", "folder of an earlier search"),
        ({"resume": "nowhere"}, "'nowhere'", "result.run_dir"),
        ({"zero_lvl": 4}, "4", "0, 1, 2, 3"),
    ],
)
def test_a_wrong_setting_is_refused(setting: dict[str, Any], found: str, wanted: str) -> None:
    given: dict[str, Any] = {"searchspace": SPACE, "num_trials": 1}
    with pytest.raises(ValueError, match=re.escape(wanted)) as raised:
        HyperparameterOptConfig(**given | setting)
    assert found in str(raised.value)


def test_a_misspelt_field_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match="has no field 'num_trial'; did you mean 'num_trials'"):
        HyperparameterOptConfig(num_trial=1)  # type: ignore[call-arg]


def test_maggys_spellings_are_understood() -> None:
    config = HyperparameterOptConfig(
        searchspace={"lr": ("discrete", [1, 2])},
        optimizer="GridSearch",
        direction="MIN",  # type: ignore[arg-type]
        es_policy="Median",
    )
    assert (config.optimizer, config.direction, config.es_policy) == ("grid", "min", "median")
    assert config.searchspace == Searchspace(lr=("DISCRETE", [1, 2]))
    assert HyperparameterOptConfig(searchspace=SPACE, optimizer="randomsearch", num_trials=1).optimizer == "random"
    plain = HyperparameterOptConfig(searchspace=SPACE, num_trials=1)
    assert (plain.optimization_key, plain.direction, plain.es_interval, plain.es_min, plain.es_policy) == (
        "Metric",
        "max",
        1,
        10,
        "none",
    )


@pytest.mark.parametrize(
    ("names", "direction"),
    [
        (["loss", "val_loss", "trainLoss", "valloss", "Error", "test/err", "top1err", "mse", "val-RMSE"], "min"),
        (["mean_absolute_error", "perplexity", "ppl", "test_nll", "WER", "cross_entropy", "logloss"], "min"),
        (["negative_log_likelihood", "kl_divergence", "ece", "losses"], "min"),
        (["Metric", "accuracy", "f1", "auc", "reward", "dice", "r2", "terrain", "mesh"], "max"),
        (["neg_mean_squared_error", "neg_loss", "glossary_f1", "lossless_ratio", "loss_reduction"], "max"),
    ],
)
def test_a_loss_or_an_error_is_minimised_unless_a_direction_is_given(names: list[str], direction: str) -> None:
    for name in names:
        config = HyperparameterOptConfig(searchspace=SPACE, num_trials=1, optimization_key=name)
        assert config.direction == direction, name
        for given in ("min", "max"):
            assert dataclasses.replace(config, direction=given).direction == given


def test_types_of_other_libraries_are_understood_in_the_error() -> None:
    for given, meant in (("FLOAT", "DOUBLE"), ("int", "INTEGER"), ("Choice", "CATEGORICAL"), ("DISCRET", "DISCRETE")):
        with pytest.raises(ValueError, match=f"types are .*; did you mean '{meant}'"):
            Searchspace(lr=(given, [1, 2]))


@pytest.mark.needs("zero")
def test_a_trial_has_the_fields_of_a_run() -> None:
    config = HyperparameterOptConfig(
        searchspace=SPACE,
        timeout_s=600,
        trial_timeout_s=60,
        ranks_per_trial=4,
        zero_lvl=2,
        hparams={"epochs": 3},
        seed=1,
    )
    trial = config.of_a_trial()
    assert type(trial) is TorchDistributedConfig
    assert (trial.world_size, trial.zero_lvl, trial.hparams, trial.seed) == (4, 2, {"epochs": 3}, 1)
    assert trial.timeout_s == 60


def test_a_config_is_frozen_copied_and_pickled() -> None:
    config = HyperparameterOptConfig(searchspace=SPACE, num_trials=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(config, num_trials=\.\.\.\)"):
        config.num_trials = 2  # type: ignore[misc]
    for other in (pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other.searchspace == SPACE


@pytest.mark.needs("zero")
def test_help_shows_the_fields_of_a_run_too() -> None:
    shown = " ".join(pydoc.plain(pydoc.render_doc(HyperparameterOptConfig)).replace("|", " ").split())
    texts = field_texts(HyperparameterOptConfig)
    assert {"zero_lvl", "num_trials"} <= texts.keys()
    for field in dataclasses.fields(HyperparameterOptConfig):
        assert f"{field.name}: {' '.join(texts[field.name].split())}" in shown
    assert "ends the run with a StallError" not in texts["timeout_s"]


def test_neither_torch_nor_optuna_is_imported_for_a_config() -> None:
    code = (
        "import sys; from lagom.config import *; "
        "HyperparameterOptConfig(num_trials=1, searchspace=Searchspace(x=('DOUBLE', [0, 1]))); "
        "assert not {'torch', 'optuna'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
