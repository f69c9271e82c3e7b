"""``lagom.experiment``: what is checked before anything starts, and what comes of the outcomes."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from lagom import experiment
from lagom.cluster import Cluster
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.driver.protocol import Outcome
from lagom.errors import LagomError, PlanError, RankError
from lagom.plan import Plan
from lagom.program.signature import Call
from lagom.wire.messages import RankReport

ROOT = Path(__file__).parent.parent


class Ranks:
    """A launcher that runs nothing and gives what it was told to."""

    def __init__(self, outcomes: Sequence[Outcome] = (), slots: int = 2) -> None:
        self.outcomes = list(outcomes)
        self.slots = slots
        self.calls: list[tuple[Plan, Call]] = []

    def cluster(self) -> Cluster:
        return Cluster(launcher="local", slots=self.slots)

    def where(self) -> str:
        return "nowhere"

    def run(self, plan: Plan, call: Call, records: Any = None, history: Any = None) -> list[Outcome]:
        self.calls.append((plan, call))
        return self.outcomes


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks([returned(0, 1.0), returned(1, 1.0)])
    monkeypatch.setattr(experiment, "choose", lambda name: ranks)
    return ranks


def returned(rank: int, value: Any, samples: int = 1) -> Outcome:
    return Outcome(rank=rank, report=RankReport(rank=rank, ok=True), load=lambda: {"value": value, "samples": samples})


def failed(rank: int, error: BaseException | None, **report: Any) -> Outcome:
    told = {"error": type(error).__name__, "message": str(error), "traceback": f"traceback of {rank}"}
    return Outcome(rank=rank, report=RankReport(rank=rank, ok=False, **told | report), load=lambda: {"error": error})


def train(hparams: Any) -> Any:
    """Is never run here."""


def test_what_the_ranks_returned_is_aggregated(launcher: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    launcher.outcomes = [returned(0, 1.0, 30), returned(1, 4.0, 10)]
    result = experiment.lagom(train, TorchDistributedConfig())
    assert result["test result"] == pytest.approx(1.75)
    assert result.per_rank == (1.0, 4.0)
    assert caplog.messages[0].endswith("result.per_rank has all of them")
    assert result.seconds > 0
    assert "train: 2 ranks on nowhere" in repr(result)


@pytest.mark.parametrize("config", [None, {"world_size": 2}, TorchDistributedConfig])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ValueError, match="want a TorchDistributedConfig"):
        experiment.lagom(train, config)


def test_swapped_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="TorchDistributedConfig"):
        experiment.lagom(TorchDistributedConfig(), train)  # type: ignore[call-overload]


def test_a_parameter_that_nothing_provides_is_refused_before_anything_starts(launcher: Ranks) -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        experiment.lagom(lambda learning_rate: None, TorchDistributedConfig())
    assert launcher.calls == []


def test_a_run_that_does_not_fit_is_refused_before_anything_starts(launcher: Ranks) -> None:
    with pytest.raises(PlanError, match="2 task slots"):
        experiment.lagom(train, TorchDistributedConfig(world_size=3))
    assert launcher.calls == []


def provided(launcher: Ranks, **settings: Any) -> Mapping[str, Any]:
    experiment.lagom(lambda: None, TorchDistributedConfig(**settings))
    return launcher.calls[-1][1].provided


def test_the_data_sets_are_provided_in_both_spellings(launcher: Ranks) -> None:
    both = {"train_set": "a", "test_set": "b", "dataset": ["a", "b"]}
    assert provided(launcher, train_set="a", test_set="b").items() >= both.items()
    assert provided(launcher, dataset=("a", "b")).items() >= both.items()


def test_what_is_not_given_is_not_provided(launcher: Ranks) -> None:
    assert set(provided(launcher)) == {"hparams"}
    assert set(provided(launcher, train_set="a")) == {"hparams", "train_set"}


def test_hparams_keep_their_type(launcher: Ranks) -> None:
    settings = MappingProxyType({"lr": 1})
    assert provided(launcher, hparams=settings)["hparams"] is settings


def test_without_a_seed_the_ranks_get_the_generators_of_this_process(launcher: Ranks, rng_untouched: None) -> None:
    experiment.lagom(train, TorchDistributedConfig(seed=None))
    assert {"torch", "numpy", "random"} <= (launcher.calls[-1][1].random_states or {}).keys()
    experiment.lagom(train, TorchDistributedConfig(seed=3))
    assert launcher.calls[-1][1].random_states is None


def test_a_consequence_alone_is_still_an_error(launcher: Ranks) -> None:
    launcher.outcomes = [returned(0, 1), failed(1, RuntimeError("connection closed"), consequence=True)]
    with pytest.raises(RuntimeError, match="connection closed"):
        experiment.lagom(train, TorchDistributedConfig())


def test_no_value_is_returned_when_a_rank_neither_returned_nor_failed(launcher: Ranks) -> None:
    launcher.outcomes = [returned(0, 1), failed(1, None, stopped=True, consequence=True)]
    with pytest.raises(RankError, match="rank 1"):
        experiment.lagom(train, TorchDistributedConfig())


@pytest.mark.soak  # tests/test_imports.py reads it from the imports
def test_a_call_on_this_machine_imports_neither_torch_nor_pyspark_into_the_driver() -> None:
    code = """
import sys
from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
def train(lr):
    import numpy, random, torch
    return lr, torch.rand(1).item(), float(numpy.random.rand()), random.random()
first, second = (experiment.lagom(train, TorchDistributedConfig(hparams={"lr": 0.5}, world_size=2)) for _ in range(2))
print(first["test result"][0], first.per_rank[0] == first.per_rank[1], len({*first.value, *second.value}))
print(sorted({"torch", "pyspark", "numpy", "pandas", "pyarrow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.split("\n")[:2], done.returncode) == (["0.5 True 7", "[]"], 0), done.stderr


def test_a_working_directory_that_was_removed_and_a_python_without_torch_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TorchDistributedConfig(launcher="local", run_dir=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LagomError, match=rf"^ranks on this machine need torch, and {sys.executable} has none: pip install"
    ):
        experiment.lagom(lambda: None, config)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LagomError, match="was removed"):
        experiment.lagom(lambda: None, config)


def test_a_misspelt_hparam_is_told_and_a_maker_of_data_with_arguments_refused(caplog: pytest.LogCaptureFixture) -> None:
    def train(learning_rate: float = 0.1) -> None: ...

    config = TorchDistributedConfig(
        launcher="inline", run_dir=None, hparams={"learnign_rate": 1.0}, train_set=lambda root: None
    )
    with pytest.raises(ValueError, match="and it needs 'root'"):
        experiment.lagom(train, config)
    experiment.lagom(train, dataclasses.replace(config, train_set=None))
    assert "nothing reads hparams['learnign_rate']; did you mean 'learning_rate'?" in caplog.text


def test_a_warning_has_lagoms_name_before_it_unless_the_program_has_set_up_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("lagom")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.warning("ranks %s", "differ")
    log.info("not shown")
    assert capsys.readouterr().err == "lagom: ranks differ\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    log.warning("ranks differ")
    assert capsys.readouterr().err == ""


def test_without_extensions_ordinary_runs_go_on_and_others_say_what_is_missing(
    launcher: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "EXTENSIONS", ())
    config = TorchDistributedConfig(launcher="local", world_size=2)
    assert experiment.lagom(lambda: 1.0, config).value == 1.0
    assert launcher.calls[0][1].sources == {}
    search = HyperparameterOptConfig(searchspace=Searchspace(lr=("DOUBLE", [0.1, 1.0])), num_trials=1)
    with pytest.raises(LagomError, match="no extension that runs trials of HyperparameterOptConfig"):
        experiment.lagom(lambda lr: lr, search)
    with pytest.raises(LagomError, match="no extension that resumes runs"):
        experiment.resume("a run")
