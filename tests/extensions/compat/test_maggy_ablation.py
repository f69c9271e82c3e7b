"""Maggy's ablation studies run as they are, with PyTorch models: both spellings, and releases before 1.0."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch

from lagom import cli
from lagom.extensions.compat import maggy
from tests.imported_once import imported_once  # noqa: F401

ROOT = Path(__file__).parents[3]
PROGRAM = """
import torch
from maggy import experiment
from maggy.ablation import AblationStudy
from maggy.experiment_config import AblationConfig


def make_passengers():
    import pandas as pd

    numbers = torch.Generator().manual_seed(3)
    age, fare, pclass = torch.rand(60, generator=numbers), torch.rand(60, generator=numbers), torch.arange(60) % 3
    survived = (age + 2 * fare > 1.5).long()
    return pd.DataFrame({"age": age, "fare": fare, "pclass": pclass, "survived": survived})


ablation_study = AblationStudy("titanic", training_dataset_version=1, label_name="survived",
                               dataset_generator=make_passengers)
ablation_study.features.include("pclass")
list_of_features = ["fare", "age"]
ablation_study.features.include(list_of_features)
ablation_study.features.exclude("age")
ablation_study.features.list_all()


def base_model_generator():
    from collections import OrderedDict

    layers = OrderedDict()
    layers["my_dense_one"] = torch.nn.Linear(3, 8)
    layers["my_dense_two"] = torch.nn.Linear(8, 8)
    layers["my_dense_three"] = torch.nn.Linear(8, 8)
    layers["output"] = torch.nn.Linear(8, 2)
    return torch.nn.Sequential(layers)


def small_model():
    return torch.nn.Linear(3, 2)


ablation_study.model.set_base_model_generator(base_model_generator)
ablation_study.model.layers.include("my_dense_two", "my_dense_three")
ablation_study.model.layers.print_all()
ablation_study.model.layers.include_groups(["my_dense_two", "my_dense_three"])
ablation_study.model.layers.include_groups(prefix="my_dense_t")
ablation_study.model.layers.print_all_groups()
ablation_study.model.add_custom_model_generator(small_model, "a small model")


def training_fn(dataset_function, model_function):
    passengers = dataset_function()
    x = torch.tensor(passengers[["age", "fare", "pclass"]].to_numpy(), dtype=torch.float32)
    y = torch.tensor(passengers["survived"].to_numpy())
    model = model_function()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return float((model(x).argmax(1) == y).float().mean())


config = AblationConfig(name="Titanic-LOCO", ablation_study=ablation_study, ablator="loco", description="",
                        hb_interval=1)
torch.manual_seed(5)
result = experiment.lagom(train_fn=training_fn, config=config)
"""


@pytest.fixture(autouse=True)
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import maggy`` works during each test; programs write into an empty folder."""
    monkeypatch.chdir(tmp_path)
    maggy.install()
    yield
    maggy.remove()


def test_a_notebooks_study_runs_with_the_import_line_alone(capfd: pytest.CaptureFixture[str]) -> None:
    program: dict[str, Any] = {"__name__": "notebook"}
    exec(PROGRAM, program)
    result = program["result"]
    expected = {"": (program["make_passengers"], program["base_model_generator"])}
    for name in ("pclass", "fare"):
        expected[f"feature {name}"] = (_without(program["make_passengers"], name), program["base_model_generator"])
    for name, gone in (
        ("layer my_dense_two", [1]),
        ("layer my_dense_three", [2]),
        ("layers my_dense_two + my_dense_three", [1, 2]),
        ("layers my_dense_t...", [1, 2]),
    ):
        expected[name] = (program["make_passengers"], _shorter(program["base_model_generator"], gone))
    expected["model a small model"] = (program["make_passengers"], program["small_model"])
    assert [trial["params"]["without"] for trial in result.trials] == sorted(expected, key=_order)
    for trial in result.trials:
        torch.manual_seed(5)
        assert trial["value"] == program["training_fn"](*expected[trial["params"]["without"]]), trial
    assert result["best_val"] == max(trial["value"] for trial in result.trials)
    assert result["num_trials"] == 8
    assert "pclass\nfare" in capfd.readouterr().out


def _without(make: Any, name: str) -> Any:
    def changed() -> Any:
        frame = make()
        frame[name] = pd.Series([0] * 60, dtype=frame[name].dtype)
        return frame

    return changed


def _shorter(make: Any, gone: list[int]) -> Any:
    def changed() -> Any:
        model = make()
        for place in gone:
            model[place] = torch.nn.Identity()
        return model

    return changed


def _order(name: str) -> int:
    kinds = ("feature", "layer ", "layers", "model")
    return next((place + 1 for place, kind in enumerate(kinds) if name.startswith(kind)), 0)


@pytest.mark.soak  # test_maggy.py runs a script so by default, and the test above the study
def test_a_script_runs_under_lagom_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "titanic.py").write_text(PROGRAM + "print('best', result['num_trials'], len(result.effects))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the script, until the test ends
    status = cli.main(["run", "-n", "2", "titanic.py"])
    out, err = capfd.readouterr()
    assert status == 0, err
    assert "best 8 7" in out
    assert "2 trials at a time" in err


def test_the_later_spelling_by_position_with_model_and_dataset() -> None:
    from maggy import experiment
    from maggy.ablation.ablationstudy import AblationStudy
    from maggy.config import AblationConfig
    from maggy.config.ablation import AblationConfig as Same

    def train(model: Any, dataset: Any) -> Any:
        return float(sum(p.numel() for p in model().parameters())) + dataset[0]["x"].sum().item()

    study = AblationStudy("sums", 1, "y")
    study.features.include("x")
    study.model.layers.include("1")
    data = {"x": torch.tensor([1.0, 5.0]), "y": torch.zeros(2)}
    config = AblationConfig(study, "loco", "min", "sums", "", 1, _network, [data, data])
    assert Same is AblationConfig
    result = experiment.lagom(train, config)
    assert [trial["value"] for trial in result.trials] == [36 + 6, 36, 30 + 6]
    assert (config.name, config.model, config.seeds) == ("sums", _network, 1)
    assert AblationConfig(study).name == "ablationStudy"


def _network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(2, 2))


def test_the_arguments_of_releases_before_1_0() -> None:
    from maggy import experiment
    from maggy.ablation import AblationStudy

    study = AblationStudy("sums", 1, "y")
    study.model.set_base_model_generator(_network)
    study.model.add_custom_model_generator(lambda: torch.nn.Linear(1, 1), "tiny")
    found = experiment.lagom(
        lambda model_function: float(sum(p.numel() for p in model_function().parameters())),
        experiment_type="ablation",
        ablation_study=study,
        ablator="loco",
        name="old",
    )
    assert [trial["value"] for trial in found.trials] == [36, 2]
    assert found["best_config"] == {"without": "", "seed": None}


def test_a_study_refuses_what_maggys_refuses() -> None:
    study = importlib.import_module("maggy.ablation").AblationStudy("titanic", 1, "survived")
    with pytest.raises(ValueError, match=r"features.include\(\) got 3.5; want names"):
        study.features.include(3.5)
    with pytest.raises(ValueError, match="'survived' is the label_name"):
        study.features.include("age", "survived")
    with pytest.raises(ValueError, match="at least two names"):
        study.model.layers.include_groups(["one"])
    with pytest.raises(ValueError, match="prefix is 3"):
        study.model.layers.include_groups(prefix=3)
    study.model.layers.include_groups(["a", "b"], prefix="c")
    study.model.layers.exclude_groups(["a", "b"])
    study.model.layers.include("d", ["e", "f"])
    study.model.layers.exclude("e")
    assert study.to_dict() == {
        "training_dataset_name": "titanic",
        "training_dataset_version": 1,
        "label_name": "survived",
        "included_features": [],
        "included_layers": ["d", "f"],
        "included_groups": [["c"]],
        "custom_models": [],
        "custom_dataset_generator": False,
    }
