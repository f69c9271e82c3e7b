"""Searches as a user runs them: a trial's number is a run's number, the best files stay, Ctrl-C, a killed driver."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.errors import LagomError, MetricError, PlanError
from tests.extensions.search import odd_trials
from tests.extensions.search.search_process import run_here, start, wait_for_trials
from tests.imported_once import imported_once  # noqa: F401

SPACE = Searchspace(lr=("DOUBLE", [1e-3, 1e-1], "log"), units=("INTEGER", [2, 8]))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def points() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(64, 3, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(train_set: Any, hparams: Any, lr: float, units: int, reporter: Any) -> dict[str, Any]:
    """Train a small network from the caller's random state; save it, and report each epoch."""
    model = torch.nn.Sequential(torch.nn.Linear(3, units), torch.nn.Tanh(), torch.nn.Linear(units, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(3):
        for inputs, targets in torch.utils.data.DataLoader(train_set, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
        reporter.broadcast(loss.item(), epoch)
    torch.save({"units": units, "model": model.state_dict()}, "best.pt")
    assert torch.load("best.pt")["units"] == units
    return {"loss": loss.item(), "lr": lr}


def config(**changes: Any) -> HyperparameterOptConfig:
    settings: dict[str, Any] = {"num_trials": 6, "searchspace": SPACE, "optimizer": "random", "direction": "min"}
    settings |= {"optimization_key": "loss", "train_set": points(), "seed": 3, "launcher": "local", "run_dir": "runs"}
    return HyperparameterOptConfig(**settings | changes)


@pytest.mark.parametrize(
    ("ranks", "launcher"),
    [
        # test_ablate.py has trials on slots, and test_reports.py on two ranks.
        *(pytest.param(ranks, "local", marks=pytest.mark.soak) for ranks in (1, 2)),
        (1, "inline"),
    ],
)
def test_the_number_of_a_trial_is_that_of_a_run_with_its_hyperparameters(ranks: int, launcher: Any) -> None:
    result = experiment.lagom(train, config(es_policy="none", ranks_per_trial=ranks, launcher=launcher, num_trials=2))
    assert [trial["state"] for trial in result.trials] == ["complete"] * 2
    for trial in result.trials:
        alone = TorchDistributedConfig(
            hparams=trial["params"], train_set=points(), seed=3, launcher="local", world_size=ranks, run_dir=None
        )
        assert experiment.lagom(train, alone)["test result"]["loss"] == trial["value"]


def test_the_best_trials_files_are_in_their_places_and_all_are_kept() -> None:
    result = experiment.lagom(train, config())
    kept = torch.load("best.pt")
    best = min((trial for trial in result.trials if trial["state"] == "complete"), key=lambda trial: trial["value"])
    assert result.best_trial == best
    assert kept["units"] == best["params"]["units"] == result.best_config["units"]
    for trial in result.trials:
        if trial["state"] == "complete":
            assert torch.load(trial["folder"] / "files/best.pt")["units"] == trial["params"]["units"]
    assert json.loads((Path(str(result.run_dir)) / "result.json").read_text())["timings"] == result.timings
    assert list(result.timings) == ["prepare", "slots", "trials", "collect"]
    assert sum(result.timings.values()) == pytest.approx(result.seconds)
    begins = [trial["started"] for trial in result.trials]
    ends = [trial["started"] + trial["prepare_s"] + trial["seconds"] for trial in result.trials]
    assert max(ends) - min(begins) <= result.timings["trials"] + 0.1
    assert f"<b>{result.timings['trials']:.2f} s</b>" in result.report().read_text()


def test_a_search_that_keeps_nothing_leaves_the_best_files() -> None:
    result = experiment.lagom(train, config(run_dir=None, num_trials=2))
    assert torch.load("best.pt")["units"] == result.best_config["units"]
    assert [path.name for path in Path().iterdir()] == ["best.pt"]
    assert [trial["folder"] for trial in result.trials] == [None, None]


def save_with_links(width: int, folder: str) -> int:
    """Write a checkpoint, with links to it that are made anew, and one at an absolute path."""
    os.makedirs(f"step{width}", exist_ok=True)
    Path(f"step{width}/model.pt").write_text(str(width))
    for name, target in (("latest.pt", f"step{width}/model.pt"), ("latest", f"step{width}")):
        if os.path.islink(name):
            os.unlink(name)
        os.symlink(target, name)
    os.makedirs(folder, exist_ok=True)
    Path(folder, "model.pt").write_text(str(width))
    return width


@pytest.mark.soak
def test_links_and_files_of_the_best_trial_that_are_there_already_are_replaced(tmp_path: Path) -> None:
    settings = {"optimizer": "grid", "num_trials": None, "direction": "max", "train_set": None}
    outside = tmp_path.parent / f"{tmp_path.name}-models"
    for widths in ([1, 2], [2, 3]):
        space = Searchspace(width=("DISCRETE", widths))
        experiment.lagom(save_with_links, config(searchspace=space, hparams={"folder": str(outside)}, **settings))
        best = str(max(widths))
        assert Path("latest.pt").read_text() == Path("latest/model.pt").read_text() == best
        assert os.readlink("latest") == f"step{best}"
        assert (outside / "model.pt").read_text() == best


def replace_folder_and_file(width: int) -> int:
    """Put a file where a folder is, and a folder where a file is."""
    os.rmdir("was_folder")
    os.unlink("was_file")
    os.mkdir("was_file")
    for name in ("was_folder", "was_file/model.pt", "model.pt"):
        Path(name).write_text(str(width))
    return width


def test_a_file_that_cannot_be_put_in_its_place_is_named_and_loses_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    os.mkdir("was_folder")
    Path("was_file").write_text("before")
    space = Searchspace(width=("DISCRETE", [1, 2]))
    result = experiment.lagom(replace_folder_and_file, config(searchspace=space, num_trials=2, train_set=None))
    assert len(result.trials) == 2
    assert Path("model.pt").read_text() == str(result.best_config["width"])
    assert Path("was_file").read_text() == "before"
    assert not list(Path("was_folder").iterdir())
    said = capfd.readouterr().err
    assert "was_folder, which the best trial wrote, could not be put there: Is a directory" in said
    assert "was_file/model.pt, which the best trial wrote, could not be put there" in said


@pytest.mark.soak  # test_reports.py and test_trial_loop.py have pruned trials
def test_a_worse_trial_is_pruned_at_its_report() -> None:
    import optuna

    pruner = optuna.pruners.ThresholdPruner(upper=0.5)
    result = experiment.lagom(
        lambda level, reporter: reporter.broadcast(level, 0) or level,
        config(
            searchspace=Searchspace(level=("DISCRETE", [0.1, 0.2, 0.9])),
            optimizer="grid",
            num_trials=None,
            es_policy=pruner,
            train_set=None,
        ),
    )
    assert {trial["params"]["level"]: trial["state"] for trial in result.trials} == {
        0.1: "complete",
        0.2: "complete",
        0.9: "pruned",
    }
    assert result.best_value == 0.1


def test_bad_calls_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"needs .*width"):
        experiment.lagom(lambda lr, units, width: 0.0, config())
    with pytest.raises(ValueError, match=r"the search varies 'units', which <lambda>\(\) never gets.*mean 'unit'"):
        experiment.lagom(lambda lr, unit=8: 0.0, config())
    with pytest.raises(PlanError, match="verify"):
        experiment.lagom(train, config(verify=True))
    with pytest.raises(PlanError, match="timeline"):
        experiment.lagom(train, config(timeline=True))
    assert not Path("runs").exists()


def test_a_choice_that_is_too_large_for_a_message_is_refused() -> None:
    space = Searchspace(table=("CATEGORICAL", [bytes(100), bytes(1 << 20)]))
    with pytest.raises(ValueError, match=r"table in the searchspace has a choice of 1024 KB.*search over its keys"):
        experiment.lagom(lambda table: len(table), HyperparameterOptConfig(searchspace=space, num_trials=2))


@pytest.mark.soak  # the next test and test_trial_loop.py have each way
def test_trials_end_in_every_way() -> None:
    odd_trials.check(odd_trials.search("local", Path("runs")))


def test_a_trial_that_hangs_is_named_and_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def hangs(level: float) -> float:
        if level == 0.2:
            time.sleep(60)
        return level

    space = Searchspace(level=("DISCRETE", [0.1, 0.2]))
    result = experiment.lagom(
        hangs,
        config(
            searchspace=space,
            optimizer="grid",
            num_trials=None,
            stall_timeout_s=0.4,
            trial_timeout_s=1.0,
            hb_interval=0.1,
        ),
    )
    states = {trial["params"]["level"]: trial["state"] for trial in result.trials}
    assert states == {0.1: "complete", 0.2: "failed"}
    assert any("StallError" in trial["error"] for trial in result.trials)
    text = capfd.readouterr().err
    assert "no progress" in text
    assert "time.sleep(60)" in text


def test_a_metric_that_is_missing_ends_the_search_with_its_name() -> None:
    with pytest.raises(MetricError, match="a dict with 'loss', 'lr', and not 'Metric'"):
        experiment.lagom(train, config(optimization_key="Metric", launcher="inline"))


def test_a_partial_function_has_the_name_of_the_function_it_calls() -> None:
    result = experiment.lagom(functools.partial(train, lr=0.1), config(num_trials=1, launcher="inline"))
    assert repr(result).startswith("Search of train ")
    assert result.trials[0]["params"]["lr"] != 0.1
    assert "-train-" in Path(str(result.run_dir)).name


def test_no_complete_trial_is_an_error_only_when_the_best_is_asked_for() -> None:
    def fails(**hparams: Any) -> float:
        raise ValueError("never works")

    result = experiment.lagom(fails, config(num_trials=2, max_failed_trials=None, launcher="inline"))
    assert [trial["error"] for trial in result.trials] == ["ValueError: never works"] * 2
    assert "last error: ValueError: never works" in repr(result)
    with pytest.raises(LagomError):
        _ = result.best_config


@pytest.mark.soak  # tests/extensions/search/notebooks/test_search.py shows it by default
def test_ctrl_c_ends_trials_that_run_and_returns_those_that_have_ended() -> None:
    program = start("0.02 if x < 0.7 else 600", 500)  # soon, both slots run a trial that takes ten minutes
    wait_for_trials(6)
    program.send_signal(signal.SIGINT)
    out, _ = program.communicate(timeout=120)
    assert program.returncode == 0
    interrupted, trials = json.loads(out)
    assert interrupted
    assert len(trials) >= 4
    assert all(state == "complete" for _, state, _ in trials)


@pytest.mark.soak  # test_kept_trials.py shows it by default
def test_a_search_goes_on_after_its_driver_was_killed(capfd: pytest.CaptureFixture[str]) -> None:
    program = start(0.3, 16)
    folder = wait_for_trials(6)
    program.kill()
    program.communicate()
    before = len(list(folder.glob("trials/*")))
    assert before < 16
    interrupted, trials = run_here(0.0, 16, str(folder))
    assert not interrupted
    assert [number for number, _, _ in trials] == list(range(16))
    assert {state for _, state, _ in trials} == {"complete"}
    assert len({value for _, _, value in trials}) == 16
    assert os.path.samefile(folder, next(Path("runs").iterdir()))
    assert re.search(r"\b16 (of 16 )?trials done", capfd.readouterr().err)
    assert run_here(0.0, 16, str(folder))[1] == trials
    errors = capfd.readouterr().err
    assert re.search(r"\b16 (of 16 )?trials done", errors)
    assert "at a time" not in errors  # no slot was started for nothing
