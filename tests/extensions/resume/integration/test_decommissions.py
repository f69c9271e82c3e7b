"""Spark decommissions an executor: the run takes a snapshot, and continues on the others with nothing lost."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.result import Result
from lagom.spark.spark_session import ClassicFacts
from tests.driver import losses
from tests.integration import clusters
from tests.integration.test_attempts import executor_of, parent

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code"),
    pytest.mark.parametrize("spark", ["decommissioning"], indirect=True, scope="session"),
    pytest.mark.timeout(600),
]
NUM_BATCHES = 3 * 24
SLOW_S = 0.05


def train(folder: str) -> list[Any]:
    """Train, and note each batch in a file; return all losses and the weights."""
    torch.manual_seed(3)
    x = torch.rand(96, 4, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    found: list[Any] = []
    batches = open(f"{folder}/batches.csv", "a")  # noqa: SIM115  (as in a program)
    for epoch in range(3):
        for batch, (rows,) in enumerate(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
            optimizer.zero_grad()
            loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            print(epoch, batch, loss.item().hex(), file=batches, flush=True)
            time.sleep(SLOW_S)
    return [found, [value.tolist() for value in model.state_dict().values()]]


def run(folder: Path, **settings: Any) -> Result:
    """Train on Spark with two ranks, and records in ``folder``."""
    config: dict[str, Any] = {"launcher": "spark", "world_size": 2, "max_failures": 0, **settings}
    return experiment.lagom(
        train, TorchDistributedConfig(run_dir=folder / "runs", hparams={"folder": str(folder)}, **config)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """What the program returns and writes when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(folder, launcher="local").value, (folder / "batches.csv").read_text()


@contextmanager
def workers(spark: Any, cores: int) -> Iterator[None]:
    """Two executors of Spark, each on a worker of its own."""
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(clusters.decommissioned_worker(spark, cores))
        losses.wait_for(lambda: ClassicFacts(spark).slots() == 2 * cores)
        yield
    losses.wait_for(lambda: spark.sparkContext._jsc.sc().getExecutorIds().size() == 0)


@contextmanager
def decommissioned(folder: Path, moment: int, victim: int, seen: dict[str, Any]) -> Iterator[None]:
    """Tell the worker of rank ``victim`` that its machine goes, once ``moment`` batches are noted."""

    def tell() -> None:
        path = folder / "batches.csv"
        losses.wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= moment)
        worker = parent(executor_of(losses.ranks(folder / "runs")[str(victim)]["pid"]))
        seen["at"], seen["noted"] = time.time(), len(path.read_text().splitlines())
        os.kill(worker, signal.SIGPWR)

    thread = threading.Thread(target=tell)
    thread.start()
    yield
    thread.join()


DRAW = random.Random(11)
MOMENTS = [(DRAW.randrange(1, NUM_BATCHES - 30), DRAW.randrange(2), DRAW.choice([1, 2])) for _ in range(20)]


@pytest.mark.parametrize(("moment", "victim", "cores"), MOMENTS)
def test_a_run_moves_to_the_executors_that_stay(
    spark: Any,
    undisturbed: tuple[list[Any], str],
    tmp_path: Path,
    moment: int,
    victim: int,
    cores: int,
    capfd: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    """With ``cores`` slots on each executor, one of which holds rank ``victim`` and goes."""
    seen: dict[str, Any] = {}
    with workers(spark, cores), decommissioned(tmp_path, moment, victim, seen):
        result = run(tmp_path, snapshot_every_s=1000)
    assert (result.value, (tmp_path / "batches.csv").read_text()) == undisturbed
    assert result.failures == []
    assert len(result.per_rank) == cores
    said = capfd.readouterr().err
    assert f"which holds rank {victim}; the run continues from batch" in said
    assert ", elsewhere" in said
    snapshot = json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())["snapshots"]
    epoch, step = snapshot["place"]
    assert 24 * (epoch - 1) + step >= seen["noted"]  # nothing is computed again that came before the notice
    record_property("seconds_to_snapshot", snapshot["at"] - seen["at"])


def test_without_room_elsewhere_the_run_stays_until_it_has_returned(
    spark: Any, undisturbed: tuple[list[Any], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with workers(spark, 1), decommissioned(tmp_path, 10, 0, {}):
        result = run(tmp_path, snapshot_every_s=1000, min_world_size=2)
    assert (result.value, (tmp_path / "batches.csv").read_text()) == undisturbed
    assert len(result.per_rank) == 2
    assert "too few other executors are there, so the run goes on there until" in capfd.readouterr().err


def test_without_snapshots_the_run_stays_and_says_so(
    spark: Any, undisturbed: tuple[list[Any], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with workers(spark, 1), decommissioned(tmp_path, 10, 1, {}):
        result = run(tmp_path)
    assert (result.value, (tmp_path / "batches.csv").read_text()) == undisturbed
    assert "which holds rank 1; the run goes on there, and keeps no snapshot (snapshot_every_s)" in (
        capfd.readouterr().err
    )
