"""``lagom.config.torch_distributed``: wrong settings are refused when the config is made."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
import torch

import lagom
from lagom.config import TorchDistributedConfig
from lagom.extensions.registry import EXTENSIONS
from lagom.settings import field_texts
from tests.extension_settings import INSTALLED, SETTINGS

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "docs" / "config.md", *sorted((ROOT / "lagom" / "extensions").glob("*/config.md")))
"""The page with all fields; an extension that the page does not know has a table of its own in its folder."""


class Net:
    """Stands for a module class; the config only asks that it can be called."""


@pytest.mark.parametrize(
    ("setting", "found", "wanted"),
    [
        ({"launcher": "yarn"}, "'yarn'", "'spark'"),
        ({"launcher": None}, "None", "'auto'"),
        ({"backend": "horovod"}, "'horovod'", "'deepspeed'"),
        ({"batches": "halved"}, "'halved'", "'per_rank'"),
        ({"evaluation": True}, "True", "'replicated'"),
        ({"sync_batchnorm": 1}, "1", "True"),
        ({"share_loading": "yes"}, "'yes'", "True"),
        ({"zero_lvl": 4}, "4", "0, 1, 2, 3"),
        ({"zero_lvl": True}, "True", "0, 1, 2, 3"),
        ({"zero_lvl": 1.0}, "1.0", "0, 1, 2, 3"),
        ({"mixed_precision": "fp8"}, "'fp8'", "'bf16'"),
        ({"mixed_precision": 1}, "1", "True"),
        ({"gradient_compression": "int8"}, "'int8'", "'bf16'"),
        ({"gradient_compression": "powersgd"}, "gone", "use 'fp16' or 'bf16'"),
        ({"gradient_compression": True}, "True", "'bf16'"),
        ({"reduction": "sum"}, "'sum'", "'adasum'"),
        ({"lr_scaling": 2}, "2", "'linear'"),
        ({"gradient_compression": "bf16", "verify": True}, "gradient_compression='bf16'", "verify without"),
        ({"lr_scaling": "linear", "verify": True}, "lr_scaling='linear'", "verify without"),
        ({"reduction": "adasum", "backend": "deepspeed"}, "reduction='adasum'", "deepspeed_config"),
        ({"module": 3}, "3", "module class"),
        ({"module": [Net, "resnet50"]}, "'resnet50'", "factory"),
        ({"hparams": None}, "NoneType", "dict"),
        ({"hparams": [("lr", 1)]}, "list", "dict"),
        ({"hparams": {1: "lr"}}, "key 1", "strings"),
        ({"dataset": [1]}, "list of 1", "[train_set, test_set]"),
        ({"dataset": (1, 2, 3)}, "tuple of 3", "[train_set, test_set]"),
        ({"dataset": {1, 2}}, "set", "[train_set, test_set]"),
        ({"dataset": pandas.DataFrame({"x": [1.0]})}, "a DataFrame", "or train_set= for one data set alone"),
        ({"module": {"weight": "x" * 10_000}}, "module is {'weight': 'xxx", "xxx...xxx"),
        ({"dataset": [1, 2], "train_set": 1}, "dataset", "one or the other"),
        ({"dataset": [1, 2], "test_set": 1}, "dataset", "one or the other"),
        ({"world_size": 0}, "0", "at least 1"),
        ({"world_size": -1}, "-1", "at least 1"),
        ({"world_size": 2.0}, "2.0", "number of ranks"),
        ({"world_size": True}, "True", "number of ranks"),
        ({"world_size": "2"}, "'2'", "number of ranks"),
        ({"world_size": 2, "launcher": "inline"}, "2", "one rank"),
        ({"seed": -1}, "-1", "None"),
        ({"seed": 2**32}, str(2**32), "2**32 - 1"),
        ({"seed": 1.5}, "1.5", "int"),
        ({"seed": False}, "False", "int"),
        ({"hb_interval": 0}, "0", "more than 0"),
        ({"hb_interval": -1.0}, "-1.0", "more than 0"),
        ({"hb_interval": float("nan")}, "nan", "more than 0"),
        ({"hb_interval": float("inf")}, "inf", "more than 0"),
        ({"hb_interval": "1"}, "'1'", "seconds"),
        ({"hb_interval": True}, "True", "seconds"),
        ({"backend": "deepspeed", "verify": True}, "verify", "backend='torch'"),
        ({"backend": "deepspeed", "mixed_precision": "fp16"}, "fp16", "deepspeed_config"),
        ({"deepspeed_config": {}}, "deepspeed_config", "backend='deepspeed'"),
        ({"deepspeed_config": 3, "backend": "deepspeed"}, "3", "dict"),
        ({"timeline": "/nowhere/at/all.json", "run_dir": "runs"}, "'/nowhere/at/all.json'", "no folder /nowhere/at"),
        ({"max_failures": -1}, "-1", "at least 0"),
        ({"max_failures": None}, "None", "how often"),
        ({"debug": "last"}, "'last'", "'first', the number of a rank, or None"),
        ({"debug": True}, "True", "'first', the number of a rank, or None"),
        ({"debug": -1}, "-1", "'first', the number of a rank, or None"),
        ({"min_world_size": 0}, "0", "at least 1"),
        ({"min_world_size": 3, "world_size": 2}, "3", "at most world_size, 2"),
        ({"name": 3}, "3", "str"),
        ({"description": None}, "None", "str"),
    ],
)
def test_a_wrong_value_is_refused_saying_what_was_found_and_what_is_wanted(
    setting: dict[str, Any], found: str, wanted: str
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the text is looked at below)
        TorchDistributedConfig(**setting)
    assert next(iter(setting)) in str(raised.value)
    assert found in str(raised.value)
    assert wanted in str(raised.value)


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"module": Net},
        {"module": lambda: None},
        {"module": [Net, Net]},
        {"module": (Net, Net)},
        {"dataset": (1, None)},
        {"dataset": ["hdfs://train", "hdfs://test"]},
        {"train_set": "hdfs://train"},
        {"world_size": 1, "launcher": "inline"},
        {"seed": None},
        {"seed": 2**32 - 1},
        {"hb_interval": 5},
        {"max_failures": 0, "min_world_size": 2, "world_size": 2},
        {"mixed_precision": True},
        {"mixed_precision": "fp16", "zero_lvl": 3},
        {"backend": "deepspeed", "deepspeed_config": {"steps_per_print": 1}},
        {"name": "a run", "description": "of something"},
    ],
)
def test_what_is_documented_is_taken(setting: dict[str, Any]) -> None:
    config = TorchDistributedConfig(**setting)
    for name, value in setting.items():
        assert getattr(config, name) is value


@pytest.mark.parametrize("module", [torch.nn.ReLU(), [Net, torch.nn.Linear(1, 1)]])
def test_an_instance_of_a_module_is_refused_naming_its_class(module: Any) -> None:
    name = type(module if isinstance(module, torch.nn.Module) else module[1]).__name__
    with pytest.raises(ValueError, match=rf"instance of {name}; .* module={name}, .*lambda: {name}\("):
        TorchDistributedConfig(module=module)


def test_fields_are_given_by_name_only() -> None:
    with pytest.raises(TypeError, match=r"by name, as in module=\.\.\.,"):
        TorchDistributedConfig(Net)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(("name", "meant"), [("hparam", "hparams"), ("batchs", "batches"), ("worldsize", "world_size")])
def test_a_misspelt_field_is_refused_with_the_nearest_one(name: str, meant: str) -> None:
    config: Any = TorchDistributedConfig()
    wrong: dict[str, Any] = {name: 1}
    for use in (
        lambda: TorchDistributedConfig(**wrong),
        lambda: dataclasses.replace(config, **wrong),
        lambda: getattr(config, name),
        lambda: setattr(config, name, 1),
    ):
        with pytest.raises((TypeError, AttributeError), match=f"no field '{name}'; did you mean '{meant}'") as raised:
            use()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "instead"), [("sleeping_twins", "snapshot_every_s")])
def test_a_removed_field_is_refused_saying_what_to_use(name: str, instead: str) -> None:
    setting: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=f"^{name} is gone; use .*{instead}"):
        TorchDistributedConfig(**setting)


def test_a_misspelt_name_of_the_package_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'experimnt'; did you mean 'experiment'\?$"):
        lagom.experimnt  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        lagom.zzz  # noqa: B018


def test_a_name_that_is_near_to_no_field_leads_to_the_list_of_them() -> None:
    with pytest.raises(TypeError, match=r"help\(TorchDistributedConfig\) lists"):
        TorchDistributedConfig(zzz=1)  # type: ignore[call-arg]


def test_a_config_cannot_be_changed_and_says_how_to_make_another() -> None:
    config = TorchDistributedConfig()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses\.replace\(config, seed=\.\.\.\)"):
        config.seed = 1  # type: ignore[misc]
    assert dataclasses.replace(config, seed=1).seed == 1
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same.seed == config.seed


@pytest.mark.soak  # the next test reads the same texts
def test_help_shows_every_field_with_its_meaning() -> None:
    shown = " ".join(pydoc.plain(pydoc.render_doc(TorchDistributedConfig)).replace("|", " ").split())
    for field in dataclasses.fields(TorchDistributedConfig):
        meaning = " ".join(field_texts(TorchDistributedConfig)[field.name].split())
        assert f"{field.name}: {meaning}" in shown


def test_every_field_stands_in_the_document_with_its_default_and_meaning() -> None:
    lines = [line for document in DOCUMENTS for line in document.read_text().splitlines()]
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    found = {row[0].strip("|` "): (row[1].strip("`"), " | ".join(row[2:]).removesuffix(" |")) for row in rows}
    removed = [name for name, extension in SETTINGS.items() if extension not in INSTALLED]
    found = {name: row for name, row in found.items() if name not in removed}
    code = "import dataclasses as d; from lagom.config import TorchDistributedConfig as C; c = C()\n"
    code += "print({each.name: getattr(c, each.name) for each in d.fields(C)})"
    plain = {"PATH": "", "PYTHONPATH": str(ROOT)}  # without LAGOM_RUN_DIR
    text = subprocess.run([sys.executable, "-c", code], env=plain, stdout=subprocess.PIPE, text=True, check=True).stdout
    wanted = {
        name: (repr(default).replace("'", '"'), " ".join(field_texts(TorchDistributedConfig)[name].split()))
        for name, default in eval(text).items()
    }
    assert found == {name: (default, meaning.replace("``", "`")) for name, (default, meaning) in wanted.items()}


def test_two_configs_do_not_share_hparams() -> None:
    assert TorchDistributedConfig().hparams is not TorchDistributedConfig().hparams


def test_repr_does_not_print_the_data() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("somebody printed the data")

    assert "seed=7" in repr(TorchDistributedConfig(train_set=Loud(), test_set=Loud(), seed=7))
    assert "seed=7" in repr(TorchDistributedConfig(dataset=[Loud(), Loud()], seed=7))


def test_data_that_has_no_length_and_no_truth_is_not_asked_for_either() -> None:
    class Untouchable:
        def __bool__(self) -> bool:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

        def __eq__(self, other: object) -> bool:
            raise AssertionError

    TorchDistributedConfig(train_set=Untouchable(), test_set=Untouchable())
    TorchDistributedConfig(dataset=[Untouchable(), Untouchable()])


def test_the_wrong_number_of_data_sets_does_not_print_the_data() -> None:
    with pytest.raises(ValueError, match="dataset") as raised:
        TorchDistributedConfig(dataset=["x" * 100_000])
    assert len(str(raised.value)) < 500


def test_the_extension_of_a_setting_that_tests_of_the_trunk_use_is_right() -> None:
    """By these names a test is skipped where its extension has been removed."""
    own = {name: each.name for each in EXTENSIONS for name in getattr(each.settings, "__dataclass_fields__", {})}
    expected = {name: extension for name, extension in SETTINGS.items() if extension in INSTALLED}
    assert {name: own.get(name) for name in expected} == expected
