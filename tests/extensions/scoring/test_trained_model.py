"""The model is found in what a training function returned, and built from a ``state_dict`` only as it was trained."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lagom import Predictor, Result, experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import DataError, LagomError
from lagom.extensions.scoring import predictor as predictor_module
from tests.extensions.scoring.models import Churn, Tuned, churn, scores, table


def train(module: Any, hparams: dict[str, Any]) -> Any:
    """A training function that returns its model in the way that ``hparams`` says."""
    torch.manual_seed(0)
    model = module()
    if hparams["way"] == "file":
        torch.save({"weights": model.state_dict(), "epoch": 3}, "churn.pt")
        return {"loss": 0.5, "path": "churn.pt"}
    ways = {"module": model, "state": model.state_dict(), "pair": (model, 0.5)}
    return ways.get(hparams["way"], {"loss": 0.5, "weights": model.state_dict(), "optimizer": {"state": {}}})


@pytest.mark.parametrize("way", ["module", "state", "pair", "dict", "file"])
def test_a_result_predicts_with_the_model_that_the_function_returned(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = TorchDistributedConfig(module=Churn, hparams={"way": way}, launcher="inline")
    result = experiment.lagom(train, config)
    found = result.predict(table(), outputs="score")["score"]
    np.testing.assert_allclose(found, scores(churn(), table()), rtol=1e-5, atol=1e-6)


def result(value: Any, module: Any = None) -> Result:
    """A result as a run gives it."""
    return Result(value, [value], seconds=1.0, module=module)


@pytest.mark.parametrize(
    ("value", "settings", "why"),
    [
        ({"loss": 0.5}, {}, "no model in what was returned: 'loss', a float. A model is a torch module"),
        (0.5, {}, "no model in what was returned: 0.5"),
        ({"loss": 0.5}, {"entry": "model"}, "there is no 'model' in what was returned: 'loss', a float"),
        ({"loss": 0.5}, {"entry": "loss"}, "'loss' is no model, but 0.5"),
        ({"g": nn.Identity(), "d": nn.Identity()}, {}, "several models: 'g', 'd'; choose one by entry='g'"),
        (churn().state_dict(), {}, "the model is a state_dict, which needs its module: give module="),
        (Tuned().state_dict(), {"module": Churn}, "the state_dict does not fit the module that module= makes"),
        (Tuned().state_dict(), {"module": lambda width: Tuned()}, "module= is called without arguments, and fails"),
        (Tuned().state_dict(), {"module": dict}, "module= returned a dict"),
    ],
)
def test_a_model_that_is_not_found_is_an_error_with_what_there_is(
    value: Any, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        result(value).predict(table(), **settings)


def test_a_module_with_arguments_is_not_guessed() -> None:
    """Its parameters would fit any number of heads."""
    state = Tuned(heads=8).state_dict()
    rows = table().rename(columns={"usage": "x"})
    with pytest.raises(
        ValueError, match="Tuned of the run's config takes heads, which only the training function knew"
    ):
        result(state, Tuned).predict(rows, inputs=[["x", "age"]])
    found = result(state, Tuned).predict(rows, inputs=[["x", "age"]], module=lambda: Tuned(heads=8))
    one = result(state, Tuned).predict(rows, inputs=[["x", "age"]], module=lambda: Tuned(heads=1))
    np.testing.assert_allclose(found["prediction"], 8 * one["prediction"], rtol=1e-5)
    with pytest.raises(ValueError, match="the run's config has a list of modules"):
        result(state, [Tuned, Churn]).predict(rows)


def test_one_of_several_models_is_chosen_by_its_key() -> None:
    found = result({"a": churn(1), "b": churn(2)}).predict(table(), entry="b")
    np.testing.assert_allclose(found["prediction"], scores(churn(2), table()), rtol=1e-5, atol=1e-6)


def test_wrapped_models_and_their_names_of_parameters_are_those_of_the_program() -> None:
    model = churn()
    wanted = Predictor(model).predict(table())["prediction"].tolist()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    assert Predictor(state, module=Churn).predict(table())["prediction"].tolist() == wanted
    assert Predictor(nn.DataParallel(copy.deepcopy(model))).predict(table())["prediction"].tolist() == wanted
    assert next(iter(state)).startswith("module.")


def test_a_module_that_is_made_draws_nothing_from_the_generators(rng_untouched: None) -> None:
    state = {"net.weight": torch.ones(1, 2), "net.bias": torch.zeros(1)}
    Predictor(state, module=Tuned)


def test_files_run_no_code(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(churn(), path)
    with pytest.raises(DataError, match=r"whole.pt cannot be read as weights.*weights_only=False"):
        Predictor(path)
    found = Predictor(torch.load(path, weights_only=False)).predict(table())
    np.testing.assert_allclose(found["prediction"], scores(churn(), table()), rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match="there is no file"):
        Predictor(os.fspath(tmp_path / "gone.pt"))


def test_without_the_extension_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, predictor_module.__name__, None)
    with pytest.raises(LagomError, match="no extension that scores rows"):
        result(churn()).predict(table())
