"""Reports of trials: values that an unmodified program logs; a pruned trial ends at one."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.extensions.search.search_result import SearchResult
from tests.imported_once import imported_once  # noqa: F401

SPACE = Searchspace(bad=("DISCRETE", [0, 1]))
SET = TensorDataset(torch.arange(12.0).unsqueeze(1), torch.arange(12.0))


class Threshold:
    """A pruner of Optuna's, as it may be written by anybody: ends trials from 100 on."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.intermediate_values[trial.last_step] >= 100)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs log into an empty folder, without a thread of tqdm's and warnings of MLflow's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def search(train: Callable[..., Any], metric: str = "loss", **fields: Any) -> SearchResult:
    """Run one trial with values that are good, and one with bad ones."""
    given: dict[str, Any] = {"searchspace": SPACE, "optimizer": "grid", "seed": 1, "es_policy": Threshold()}
    given |= {"launcher": "inline", "run_dir": None, "direction": "max", "optimization_key": metric}
    return experiment.lagom(train, HyperparameterOptConfig(**given | fields))


def reports(result: SearchResult) -> dict[int, dict[int, float]]:
    """Return the reports by step, for each value of ``bad``; the bad trial ended at the first that is bad."""
    assert result.study is not None
    trials = {trial["params"]["bad"]: trial for trial in result.trials}
    assert {bad: trial["state"] for bad, trial in trials.items()} == {0: "complete", 1: "pruned"}, [
        (t["state"], t["error"], t["traceback"]) for t in result.trials
    ]
    found = {bad: result.study.trials[trial["number"]].intermediate_values for bad, trial in trials.items()}
    assert [value >= 100 for value in found[1].values()] == [False] * (len(found[1]) - 1) + [True]
    return found


def values(bad: int) -> list[float]:
    """Values of four epochs; bad ones from the third on."""
    return [1.0, 2.0, 100.0 * bad + 3.0, 100.0 * bad + 4.0]


def with_mlflow(bad: int, log: str) -> float:
    """Log to MLflow in one of its ways."""
    import mlflow

    mlflow.set_tracking_uri(f"{Path.cwd()}/runs-{bad}")
    with mlflow.start_run() as run:
        for epoch, value in enumerate(values(bad)):
            mlflow.log_metric("accuracy", -1.0, step=epoch)
            if log == "metric":
                mlflow.log_metric("loss", value, step=epoch)
            elif log == "metrics":
                mlflow.log_metrics({"accuracy": 0.5, "val/loss": value}, step=epoch)
            elif log == "no step":
                mlflow.log_metric("loss", value)
            else:
                mlflow.MlflowClient().log_metric(run.info.run_id, "loss", value, step=10 * epoch)
    return 0.0


@pytest.mark.parametrize("log", ["metric", "metrics", "no step", "client"])
def test_mlflow(log: str) -> None:
    found = reports(search(functools.partial(with_mlflow, log=log)))
    steps = [0, 10, 20, 30] if log == "client" else [0, 1, 2, 3]
    assert found == {0: dict(zip(steps, values(0), strict=True)), 1: dict(zip(steps[:3], values(1)[:3], strict=True))}


def with_tensorboard(bad: int, log: str) -> float:
    """Log to TensorBoard in one of its ways."""
    if log == "tensorboardX":
        from tensorboardX import SummaryWriter
    else:
        from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(f"events-{bad}") as writer:
        for epoch, value in enumerate(values(bad)):
            if log == "scalars":
                writer.add_scalars("train", {"accuracy": 0.5, "loss": torch.tensor(value)}, epoch)
            else:
                writer.add_scalar("train/loss", value, epoch)
                writer.add_scalar("val/loss", 1000.0, epoch)  # another series
                writer.add_scalar("loss/val", 1000.0, epoch)
    return 0.0


@pytest.mark.parametrize("log", ["scalar", "scalars", "tensorboardX"])
def test_tensorboard(log: str) -> None:
    found = reports(search(functools.partial(with_tensorboard, log=log)))
    assert found == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


def test_the_whole_tag_names_one_of_several_series() -> None:
    result = search(functools.partial(with_tensorboard, log="scalar"), "val/loss")
    assert [trial["value"] for trial in result.trials] == [1000.0, 1000.0]


def with_tqdm(bad: int, log: str) -> float:
    """Show the loss of each epoch in one of the ways of tqdm."""
    from tqdm.auto import trange  # type: ignore[import-untyped]

    if log == "epochs":
        bar = trange(4, disable=None)
        for epoch in bar:
            for _ in DataLoader(SET, batch_size=4):
                bar.set_postfix(accuracy=0.5)
            bar.set_postfix(loss=f"{values(bad)[epoch]:.1f}", accuracy=0.5)
        return 0.0
    for value in values(bad):
        with tqdm.tqdm(DataLoader(SET, batch_size=4), disable=log == "disabled") as bar:
            for step, _ in enumerate(bar):
                bar.set_postfix({"loss": torch.tensor(value - 2 + step)}, refresh=False)
        with torch.no_grad():
            for _ in (bar := tqdm.tqdm(DataLoader(SET, batch_size=6))):
                bar.set_postfix(loss=5000.0)
    return 0.0


@pytest.mark.parametrize("log", ["batches", "disabled", "epochs"])
def test_tqdm(log: str) -> None:
    found = reports(search(functools.partial(with_tqdm, log=log)))
    assert found == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


def test_a_pass_that_is_left_early_counts_at_the_next() -> None:
    def train(bad: int) -> float:
        for value in [*values(bad), 0.0]:
            bar = tqdm.tqdm(DataLoader(SET, batch_size=4))
            for _ in bar:
                bar.set_postfix(loss=value)
                break
        return 0.0

    assert reports(search(train)) == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


def test_values_of_one_source_count() -> None:
    def train(bad: int, reporter: Any) -> float:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(f"events-{bad}") as writer:
            for epoch, value in enumerate(values(bad)):
                reporter.broadcast(value, step=epoch)
                writer.add_scalar("loss", 1000.0, epoch)
        return 0.0

    assert reports(search(train)) == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


def test_steps_go_on_where_the_program_begins_anew() -> None:
    def train(bad: int) -> float:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(f"events-{bad}") as writer:
            for first, second in (values(bad)[:2], values(bad)[2:]):
                writer.add_scalar("loss", first, 0)
                writer.add_scalar("loss", second, 5)
        return 0.0

    assert reports(search(train)) == {0: dict(zip([0, 5, 6, 7], values(0), strict=True)), 1: {0: 1.0, 5: 2.0, 6: 103.0}}


def test_what_is_no_number_or_is_logged_aside_is_no_report() -> None:
    def train(bad: int) -> float:
        import threading

        bar = tqdm.tqdm()
        bar.set_postfix(loss="n/a")
        bar.set_postfix(loss=[1, 2])
        thread = threading.Thread(target=bar.set_postfix, kwargs={"loss": 1000.0})
        thread.start()
        thread.join()
        for value in values(bad):
            bar.set_postfix(loss=value)
        return 0.0

    assert reports(search(train)) == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


def test_the_program_cannot_go_on_after_it_has_caught_the_end() -> None:
    def train(bad: int, reporter: Any) -> float:
        for value in values(bad):
            with contextlib.suppress(BaseException):
                with contextlib.suppress(Exception):
                    reporter.broadcast(value)
                value = 0.0
            assert value == 0.0 or bad
        reporter.broadcast(0.0)
        return 0.0

    assert reports(search(train))[1] == {0: 1.0, 1: 2.0, 2: 103.0}


def fit(bad: int, losses_of_a_batch: int = 1, scaled: bool = False, epochs: int = 4) -> float:
    """Train on 3 batches with the losses 1 to 3 in the first epoch, 2 to 4 in the second; bad from the third on."""
    weight = torch.zeros(1, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for epoch in range(epochs):
        for batch, _ in DataLoader(SET, batch_size=4):
            for _ in range(losses_of_a_batch):
                base = 1.0 + epoch + float(batch[0, 0]) / 4 + 100 * bad * (epoch > 1)
                scaler.scale((weight * 0).sum() + base).backward()
        with torch.no_grad():
            for batch, _ in DataLoader(SET, batch_size=6):
                (weight * batch).sum()
    return 0.0


@pytest.mark.parametrize("scaled", [False, True])
def test_the_mean_loss_of_a_pass_counts_where_nothing_is_logged(scaled: bool) -> None:
    found = reports(search(functools.partial(fit, scaled=scaled), direction="min"))
    assert found == {0: {0: 2.0, 1: 3.0, 2: 4.0}, 1: {0: 2.0, 1: 3.0, 2: 104.0}}


@pytest.mark.parametrize(
    "fields",
    [
        {"direction": "max"},
        {"direction": "min", "metric": "val_loss"},
        {"direction": "min", "metric": "error"},
        {"direction": "min", "es_policy": "none"},
    ],
)
def test_the_loss_of_a_pass_is_no_other_metric(fields: dict[str, Any]) -> None:
    result = search(fit, **fields)
    assert result.study is not None
    assert [trial.intermediate_values for trial in result.study.trials] == [{}, {}]


def test_where_batches_have_several_losses_none_is_the_loss() -> None:
    result = search(functools.partial(fit, losses_of_a_batch=2), direction="min")
    assert result.study is not None
    assert [trial.intermediate_values for trial in result.study.trials] == [{}, {}]


def test_what_the_program_logs_after_a_pass_counts_in_place_of_its_loss() -> None:
    def train(bad: int) -> float:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(f"events-{bad}") as writer:
            for epoch, value in enumerate(values(bad)):
                fit(bad, epochs=1)
                writer.add_scalar("loss", value, epoch)
        return 0.0

    assert reports(search(train, direction="min")) == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


@pytest.mark.soak
def test_ranks_end_together_where_rank_0_alone_logs() -> None:
    def train(bad: int) -> float:
        import lagom

        model = torch.nn.Linear(1, 1)
        for value in values(bad):
            for batch, _ in DataLoader(SET, batch_size=4):
                model(batch).sum().backward()
            if lagom.rank() == 0:
                with_tensorboard_once(value)
        return 0.0

    result = search(train, launcher="local", ranks_per_trial=2, num_slots=1)
    assert reports(result) == {0: dict(enumerate(values(0))), 1: dict(enumerate(values(1)[:3]))}


def with_tensorboard_once(value: float) -> None:
    """Log one value."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("events") as writer:
        writer.add_scalar("loss", value)


@pytest.mark.parametrize(
    "program", [fit, pytest.param(functools.partial(with_tensorboard, log="scalar"), marks=pytest.mark.soak)]
)
def test_two_ranks_report_once_and_end_together(program: Callable[..., float]) -> None:
    one = reports(search(program, direction="min"))
    two = reports(search(program, direction="min", launcher="local", ranks_per_trial=2, num_slots=1))
    assert two == one
