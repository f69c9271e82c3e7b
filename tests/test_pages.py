"""Pages for people who come from elsewhere: programs in them run, and each line of their tables has a check here."""

from __future__ import annotations

import importlib
import os
import re
import sys
import types
import webbrowser
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import experiment
from lagom.cluster import Cluster
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.plan import plan
from tests.test_features import faults

ROOT = Path(__file__).parent.parent
SET = TensorDataset(torch.arange(10.0).unsqueeze(1), torch.arange(10.0))
Check = Callable[[], None]
NEEDS = {
    "README": ("data", "observe", "search", "verify", "zero"),
    "data": ("data",),
    "debug": ("observe",),
    "gpu": ("zero",),
    "horovod": ("compat",),
    "index": ("zero",),
    "maggy": ("compat", "search"),
    "scoring": ("data", "scoring"),
    "search": ("search",),
    "seeing": ("observe",),
    "survive": ("resume",),
    "verify": ("verify",),
    "zero": ("zero",),
}
"""Extensions that the programs of a page use."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs write beside themselves; names of Maggy's are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    if find_spec("lagom.extensions.compat") is None:
        yield
        return
    from lagom.extensions.compat import maggy

    maggy.install()
    yield
    maggy.remove()


def on(world_size: int, train: Callable[..., Any], **fields: Any) -> Any:
    """The result of a run on this machine."""
    return experiment.lagom(
        train, TorchDistributedConfig(launcher="local", world_size=world_size, run_dir=None, **fields)
    )


PROGRAMS = {
    path: re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
"""The Python of each page but what is marked no-run: it needs a cluster, or a person."""


LONG = ("ablation", "torch_distributor")
"""Pages whose programs take many trials, or import what makes a model of DistributedDataParallel."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[pytest.mark.needs(*NEEDS.get(path.stem, ())), *[pytest.mark.soak] * (path.stem in LONG)],
        )
        for path, blocks in PROGRAMS.items()
        if blocks
    ],
)
def test_programs_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(webbrowser, "open", lambda url: True)
    program = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)  # where a notebook's functions live
    if page.stem == "README":  # whose programs are cut short
        vars(program).update(
            {name: getattr(lagom.config, name) for name in lagom.config.__all__},
            Approximator=torch.nn.Identity,
            test_loss=0.5,
            train_set=SET,
            test_set=SET,
        )
    for block in (re.sub("(num_trials|seeds)=[0-9]+", r"\1=2", text) for text in PROGRAMS[page]):
        exec(compile(block, page.name, "exec"), vars(program))
    if page.stem == "torch_distributor":
        assert torch.equal(torch.load("model.pt")["weight"], vars(program)["model"].weight)


def _tables(page: str) -> list[str]:
    lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    cells = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    return [cell for cell in cells if cell not in ("Maggy", "TorchDistributor")]


def _maggys_names() -> None:
    one = importlib.import_module("maggy.experiment")
    two = importlib.import_module("maggy.experiment.experiment")
    assert one.lagom is two.lagom
    assert one.lagom(train_fn=lambda: 3).per_rank == (3,)
    earlier = importlib.import_module("maggy.experiment_config").TorchDistributedConfig
    assert importlib.import_module("maggy.config").TorchDistributedConfig is earlier
    assert issubclass(earlier, TorchDistributedConfig)
    assert earlier(dataset=[SET, SET], zero_lvl=3).batches == "per_rank"
    assert earlier(train_set=SET, mixed_precision=True).mixed_precision is True


def _maggys_loaders() -> None:
    patching = importlib.import_module("maggy.core.patching")
    assert issubclass(patching.MaggyDataLoader, DataLoader)
    assert issubclass(patching.MaggyPetastormDataLoader, lagom.PetastormDataLoader)


def _reporter_and_folder() -> None:
    def train(reporter: Any) -> str:
        from maggy import tensorboard

        reporter.broadcast(metric=0.5, step=1)
        reporter.log("told")
        folder: str = tensorboard.logdir()
        Path(folder, "events").write_text("1")
        return folder

    assert set(on(2, train).per_rank) == {os.path.abspath("training_logs")}
    assert Path("training_logs/events").read_text() == "1"


def _unserved(*names: str) -> Check:
    def check() -> None:
        for name in names:
            with pytest.raises(NotImplementedError, match=f"{name} is not served"):
                getattr(importlib.import_module("maggy.config"), name)()

    return check


def _search(train: Callable[..., Any], **fields: Any) -> Any:
    space = Searchspace(x=("DISCRETE", [1, 2]))
    config = HyperparameterOptConfig(searchspace=space, optimizer="grid", launcher="local", run_dir=None, **fields)
    return experiment.lagom(train, config)


def _ranks_of_a_trial() -> None:
    assert _search(lambda x: x * lagom.world_size(), ranks_per_trial=2)["metric_list"] in ([2, 4], [4, 2])


def _failed_trial() -> None:
    result = _search(lambda x: 1 / (x - 1), num_slots=1)
    assert sorted(trial["error"] for trial in result.trials) == ["", "ZeroDivisionError: division by zero"]
    assert (result.best_config, result.best_value) == ({"x": 2}, 1)


def _callbacks() -> None:
    with pytest.raises(ImportError, match="Keras"):
        importlib.import_module("maggy.callbacks")


def _precision() -> None:
    def train() -> torch.dtype:
        inner: list[torch.dtype] = []
        model = torch.nn.Linear(1, 1)
        handle = model.register_forward_hook(lambda module, given, out: inner.append(out.dtype))
        model(torch.ones(2, 1))
        handle.remove()
        return inner[0]

    assert set(on(2, train, mixed_precision=True).per_rank) == {torch.bfloat16}


def _epochs() -> None:
    def train() -> list[list[float]]:
        orders = []
        for shuffle in (False, True):
            loader = DataLoader(SET, batch_size=5, shuffle=shuffle, num_workers=1, drop_last=True)
            orders += [[float(y) for _, ys in loader for y in ys] for _ in range(2)]
        return orders

    plain, again, first, second = on(1, train).value
    assert plain == again == list(range(10))
    assert first != second
    assert sorted(first) == sorted(second) == plain


def _evaluation_and_results() -> None:
    def train() -> dict[str, Any]:
        model = torch.nn.Linear(1, 1)
        model.eval()
        with torch.no_grad():
            seen = [float(y) for x, ys in DataLoader(SET, batch_size=4) for y in (model(x), ys)[1]]
        return {"seen": seen, "rank": lagom.rank(), "tensor": torch.ones(2)}

    result = on(3, train)
    assert all(one["seen"] == list(range(10)) for one in result.per_rank)
    assert [one["rank"] for one in result.per_rank] == [0, 1, 2]


def _undone() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}, vars(DataLoader).copy()
    experiment.lagom(lambda: None, TorchDistributedConfig(launcher="inline", run_dir=None))
    assert before == ({name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}, vars(DataLoader).copy())


def _world_size() -> None:
    cluster = Cluster(launcher="spark", slots=5)
    assert plan(TorchDistributedConfig(), cluster).world_size == 5
    assert on(2, lagom.world_size).per_rank == (2, 2)
    assert on(2, lagom.rank).per_rank == (0, 1)


def _gpus() -> None:
    assert plan(TorchDistributedConfig(), Cluster(launcher="spark", slots=2, gpus_per_slot=1)).gpu
    assert not plan(TorchDistributedConfig(), Cluster(launcher="spark", slots=2)).gpu


def _arguments() -> None:
    def train(learning_rate: float, epochs: int = 1) -> tuple[float, int]:
        return learning_rate, epochs

    assert on(2, train, hparams={"learning_rate": 1e-3, "epochs": 2}).value == (1e-3, 2)


def _distributed_itself() -> None:
    def train() -> Any:
        rank, place = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        torch.distributed.init_process_group("gloo")
        size = torch.distributed.get_world_size()
        torch.distributed.barrier()  # gloo on one rank may still wait for the other's address, which must not be gone
        torch.distributed.destroy_process_group()
        return rank, place, size, os.environ["WORLD_SIZE"]

    assert on(2, train).per_rank == ((0, 0, 2, "2"), (1, 1, 2, "2"))
    assert on(2, lambda: "RANK" in os.environ).value is False


def _saved_once() -> None:
    def train() -> None:
        torch.save(torch.full((2,), float(lagom.rank())), "saved.pt")

    on(2, train)
    assert torch.load("saved.pt").tolist() == [0, 0]


def _own_exception() -> None:
    def train() -> None:
        raise KeyError("a name that is missing")

    with pytest.raises(KeyError, match="a name that is missing"):
        on(2, train)


def _modules() -> None:
    Path("beside_the_notebook.py").write_text("def train():\n    return 7\n")
    sys.path.insert(0, os.getcwd())
    try:
        assert on(2, importlib.import_module("beside_the_notebook").train).value == 7
    finally:
        sys.path.remove(os.getcwd())
        del sys.modules["beside_the_notebook"]


CHECKS: dict[str, dict[str, Check | str]] = {
    "maggy": {
        "`from maggy import experiment`": _maggys_names,
        "`from maggy.experiment import experiment`": _maggys_names,
        "`maggy.experiment_config.TorchDistributedConfig`": _maggys_names,
        "`maggy.config.TorchDistributedConfig`": _maggys_names,
        "`zero_lvl=1`, `2`, `3`": (
            "tests/extensions/compat/test_maggy.py::test_the_example_runs_unchanged_under_lagom_run"
        ),
        "`mixed_precision=True`": _precision,
        '`backend="deepspeed"`': "tests/extensions/compat/test_maggy.py::test_deepspeed_programs_run_on_cpu_too",
        "`MaggyDataLoader`": _maggys_loaders,
        "`MaggyPetastormDataLoader`": _maggys_loaders,
        "`reporter.broadcast`, `reporter.log`": _reporter_and_folder,
        "`maggy.tensorboard.logdir()`": _reporter_and_folder,
        "`lagom(train)` without a config": _maggys_names,
        "`TfDistributedConfig`": _unserved("TfDistributedConfig"),
        "`HyperparameterOptConfig`, `OptimizationConfig`": (
            "tests/extensions/compat/test_maggy_search.py::test_a_search_in_the_earlier_spelling_by_position"
        ),
        "`Searchspace`": "tests/extensions/compat/test_maggy_search.py::test_a_search_in_the_later_spelling",
        "`experiment.lagom(train, searchspace=..., optimizer=...)`": (
            "tests/extensions/compat/test_maggy_search.py::test_the_arguments_of_releases_before_1_0"
        ),
        "`direction`": "tests/test_search_config.py::test_maggys_spellings_are_understood",
        '`es_policy="median"`, unless it is given': (
            "tests/extensions/search/test_study.py::test_with_one_slot_the_trials_are_those_of_optimize"
        ),
        "`maggy.optimizer`, `maggy.earlystop`, `maggy.pruner`": (
            "tests/extensions/compat/test_maggy_search.py::test_algorithms_of_ones_own_are_named_as_optunas"
        ),
        "`AblationConfig`, `AblationStudy`": (
            "tests/extensions/compat/test_maggy_ablation.py::test_the_later_spelling_by_position_with_model_and_dataset"
        ),
        "`dataset_function`, `model_function`": (
            "tests/extensions/compat/test_maggy_ablation.py::test_a_notebooks_study_runs_with_the_import_line_alone"
        ),
        '`experiment.lagom(train, experiment_type="ablation", ...)`': (
            "tests/extensions/compat/test_maggy_ablation.py::test_the_arguments_of_releases_before_1_0"
        ),
        "`maggy.ablation.ablator`": "tests/extensions/compat/test_maggy.py::test_modules_that_are_not_served_say_so",
        "`maggy.callbacks`": _callbacks,
        "GPUs only": _precision,
        "a search runs one rank for each trial": _ranks_of_a_trial,
        "an ablation study has one trial a variant": (
            "tests/extensions/search/test_ablate.py::test_variants_are_those_made_by_hand_bit_for_bit"
        ),
        "a failed trial ends the search": _failed_trial,
        "loaders are always shuffled, and in one order for all epochs": _epochs,
        "`num_workers`, samplers and `batch_sampler` are dropped": _epochs,
        "the end of a test set is padded, and ranks count alike": _evaluation_and_results,
        "a tensor that is returned is an error": _evaluation_and_results,
        "the average of the ranks' results, alone": _evaluation_and_results,
        "`import maggy` after a run finds a changed torch": _undone,
    },
    "torch_distributor": {
        "`num_processes=2`": _world_size,
        "`local_mode=True`": _world_size,
        "`local_mode=False`": _world_size,
        "`use_gpu=True`": _gpus,
        "`run(train, 1e-3, epochs=2)`": _arguments,
        '`run("train.py", "--epochs=2")`': (
            "tests/test_cli.py::test_a_script_prints_and_saves_on_two_ranks_what_plain_python_does"
        ),
        "`init_process_group`, DDP, FSDP2, `DistributedSampler`": _distributed_itself,
        "`RANK`, `LOCAL_RANK`, `WORLD_SIZE`": _distributed_itself,
        "`if rank == 0: torch.save(...)`": _saved_once,
        "the value that a rank returned": _evaluation_and_results,
        "`RuntimeError` that names torchrun's log": _own_exception,
        "output in the executors' logs": (
            "tests/driver/test_local.py::test_prints_and_an_exception_that_nobody_catches_are_those_of_a_plain_run_to_the_byte"
        ),
        "a function imported from a module beside the notebook": _modules,
        "`DeepspeedTorchDistributor(deepspeedConfig=...)`": ("tests/extensions/zero/test_levels.py::test_on_deepspeed"),
    },
}
"""For each page and first cell of a row, the check that runs here, or the name of the test that shows it."""


EVERY = {check: page for page, checks in reversed(CHECKS.items()) for check in checks.values()}
"""Each check, with the first page that has it."""


def _param(value: Any, page: str) -> Any:
    return pytest.param(value, marks=pytest.mark.needs(*NEEDS.get(page, ())))


@pytest.mark.parametrize("page", [_param(page, page) for page in CHECKS])
def test_every_line_of_a_table_has_a_check(page: str) -> None:
    assert _tables(page) == list(CHECKS[page])
    assert [
        fault for name in CHECKS[page].values() if isinstance(name, str) for fault in faults(0, f"`{name}`", ROOT)
    ] == []


@pytest.mark.parametrize("check", [_param(one, page) for one, page in EVERY.items() if not isinstance(one, str)])
def test_what_a_table_says_is_so(check: Check) -> None:
    check()
