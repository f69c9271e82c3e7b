"""``result.speed`` of a whole run: in its records, its report, and its last line."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.result import Result
from lagom.speed import TITLES, Speed, duration
from tests.imported_once import imported_once  # noqa: F401


class Slow(Dataset[Tensor]):
    """Samples that each take 5 ms, a batch of four 20 ms."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 4 * self.batches

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.005)
        return torch.full((3,), float(index))


def train(batches: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for x in DataLoader(Slow(batches), batch_size=4):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


def compute() -> int:
    return 7


def run(function: Any, world_size: int, folder: Path, launcher: Any = "local", **hparams: Any) -> Result:
    config = TorchDistributedConfig(
        launcher=launcher, world_size=world_size, run_dir=folder, hparams=hparams, name="train"
    )
    return experiment.lagom(function, config)


def recorded(result: Result) -> Any:
    assert result.run_dir is not None
    return json.loads((result.run_dir / "run.json").read_text())["speed"]


@pytest.mark.parametrize(
    ("world_size", "launcher"),
    [(1, "inline"), (2, "local"), *(pytest.param(size, "local", marks=pytest.mark.soak) for size in (1, 3))],
)
def test_a_run_whose_loading_is_slow_ends_with_a_line_about_it(
    world_size: int, launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(train, world_size, tmp_path, launcher, batches=160)
    speed = result.speed
    assert (speed.world_size, speed.steps) == (world_size, 160 - 16)
    assert speed.seconds_of("loading") >= 0.02 / world_size
    assert Speed.from_json(recorded(result)) == speed
    lines = [line for line in capfd.readouterr().err.splitlines() if "a step takes" in line]
    assert lines == [f"lagom: train: {speed.line()}"]
    assert re.search(r"; \d+% of a step is loading: give the loader num_workers=\d", lines[0])
    assert result.run_dir is not None
    assert lines[0] in (result.run_dir / "lagom.log").read_text()
    page = result.report().read_text()
    assert page.count("Where a step's time goes") == 1
    for part in speed.parts:
        assert f"{TITLES[part.name]}</td><td>{duration(part.seconds)}</td>".replace("'", "&#x27;") in page
    assert page.count("one process (estimate)") == (2 if world_size > 1 else 0)


def test_a_short_run_has_a_speed_and_no_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(train, 2, tmp_path, batches=6)
    assert result.speed.steps == 4
    assert "a step takes" not in capfd.readouterr().err


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_without_steps_has_an_empty_speed(
    world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(compute, world_size, tmp_path)
    assert not result.speed
    assert result.speed == Speed(world_size=world_size) == Speed.from_json(recorded(result))
    assert "a step takes" not in capfd.readouterr().err
    assert "Where a step's time goes" not in result.report().read_text()
