"""Config of an ablation study: settings that it takes and refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lagom.config import AblationConfig, AblationStudy, TorchDistributedConfig


@pytest.mark.parametrize(
    ("given", "found", "wanted"),
    [
        ({"seeds": 0}, "seeds is 0", "number of seeds"),
        ({"seeds": True}, "seeds is True", "number of seeds"),
        ({"seeds": [1, 1]}, r"seeds is \[1, 1\]", "different seeds"),
        ({"seeds": [-1]}, r"seeds is \[-1\]", "different seeds"),
        ({"seeds": []}, r"seeds is \[\]", "list of"),
        ({"seeds": -1}, "seeds is -1", "number of seeds"),
        ({"seeds": 2, "seed": 2**32 - 1}, "seeds is 2 and seed is 4294967295", r"from 0 to 2\*\*32 - 1"),
        ({"ablator": "lofo"}, "'lofo'", "'loco'"),
        ({"ablation_study": {"features": ["age"]}}, "'features'", "AblationStudy"),
        ({"world_size": 2}, "world_size is 2", "ranks_per_trial=2"),
        ({"direction": "up"}, "'up'", "'max' or 'min'"),
        ({"num_slots": 0}, "num_slots is 0", "at least 1"),
        ({"zero_lvl": 4}, "zero_lvl is 4", "0, 1, 2, 3"),
        ({"resume": "/nowhere"}, "/nowhere", "run_dir of a search"),
    ],
)
def test_a_wrong_setting_is_refused(given: Any, found: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){found}.*{wanted}"):
        AblationConfig(**given)


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ({}, [0, 1, 2]),
        ({"seeds": 2, "seed": 7}, [7, 8]),
        ({"seeds": [5, 3]}, [5, 3]),
        ({"seeds": 1}, [None]),
        ({"seeds": 1, "seed": 9}, [9]),
        ({"seeds": 2, "seed": 2**32 - 2}, [2**32 - 2, 2**32 - 1]),
    ],
)
def test_seeds_count_from_the_seed(given: Any, seeds: list[int | None]) -> None:
    assert AblationConfig(**given).seed_values == seeds


@pytest.mark.needs("zero")
def test_a_trial_has_the_settings_of_a_run() -> None:
    study = AblationStudy()
    study.model.set_base_model_generator(dict)
    config = AblationConfig(ablation_study=study, zero_lvl=2, ranks_per_trial=3, seed=5, batches="split", timeout_s=9)
    trial = config.of_a_trial()
    assert type(trial) is TorchDistributedConfig
    assert (trial.zero_lvl, trial.world_size, trial.batches, trial.timeout_s) == (2, 3, "split", None)
    assert (trial.seed, trial.module) == (None, dict)
    assert dataclasses.replace(config, module=list).of_a_trial().module is list


def test_help_explains_every_field() -> None:
    text = AblationConfig.__doc__ or ""
    assert all(f"{each.name}:" in text for each in dataclasses.fields(AblationConfig))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda study: study.features.include(""), r"features.include\(\) got ''; want names or numbers of columns"),
        (lambda study: study.features.include(True), "got True"),
        (lambda study: study.features.include_groups([1]), "at least two names"),
        (lambda study: study.features.include_groups("age"), "got 'age'"),
        (lambda study: study.model.layers.include(3), r"layers.include\(\) got 3; want names"),
        (lambda study: study.model.set_base_model_generator(None), "the base model generator is None"),
        (lambda study: study.model.add_custom_model_generator(3, "x"), "the model generator is 3"),
        (lambda study: AblationStudy(feature_names="age"), "feature_names is 'age'"),
    ],
)
def test_a_component_that_is_none_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(AblationStudy())


def test_a_study_lists_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    study = AblationStudy()
    study.features.include(3, ["age", "fare"])
    study.features.include_groups(["age", 1])
    study.features.exclude("fare")
    study.model.layers.include("a.*", "b")
    study.model.layers.include_groups(["c.*"], prefix="d")
    study.model.layers.exclude("b", "never")
    assert repr(study) == (
        "AblationStudy that leaves out feature 3, feature age, features age + 1, layer a.*, layers d..., layers c.*"
    )
    study.features.list_all()
    study.model.layers.print_all()
    study.model.layers.print_all_groups()
    assert capsys.readouterr().out.split("\n") == (
        ["3", "age", "age + 1", "Included single layers:", "a.*", "Included groups of layers:", "d...", "c.*", ""]
    )
    study.features.exclude_groups(["age", 1])
    study.model.layers.exclude_groups(["c.*"], prefix="d")
    assert [str(one) for one in study.components] == ["feature 3", "feature age", "layer a.*"]
