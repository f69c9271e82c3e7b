"""``verify=True`` of a run that keeps snapshots: whether its program continues from one as it would have gone on."""

from __future__ import annotations

import logging
import os
import sys
import threading
from os import listdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError, VerificationError
from tests.imported_once import imported_once  # noqa: F401

POINTS = torch.rand(29, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))

pytestmark = [
    pytest.mark.usefixtures("rng_untouched"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code"),
]


def train(by_process: bool = False, in_thread: bool = False) -> Any:
    """Momentum by hand, for each parameter by name, or by name and process; reads back what it has written."""
    log = logging.getLogger("resumption")
    log.setLevel(logging.INFO)
    log.addHandler(logging.FileHandler("train.log"))
    out, ended = sys.stdout, threading.Event()
    if in_thread:
        threading.Thread(target=ended.wait, name="poller").start()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
    loader, losses = DataLoader(DATA, batch_size=8, shuffle=True), list[float]()
    velocities: dict[Any, Any] = {}
    for epoch in range(2):
        for x, y in loader:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                for name, one in model.named_parameters():
                    key = (os.getpid(), name) if by_process else name
                    velocities[key] = 0.9 * velocities.get(key, 0.0) + one.grad
                    one.sub_(velocities[key], alpha=0.1)
            losses.append(loss.item())
            log.info("loss %.17g", losses[-1])
        print(f"epoch {epoch}: {losses[-1]:.12g}", file=out)
        torch.save(model.state_dict(), f"model-{epoch}.pt")
    ended.set()
    return losses, Path("train.log").read_text(), [name for name in sorted(listdir()) if name.endswith(".pt")]


def config(**more: Any) -> TorchDistributedConfig:
    return TorchDistributedConfig(
        launcher="local", world_size=2, seed=0, run_dir="runs", verify=True, snapshot_every_s=3600.0, **more
    )


def row(text: str) -> str:
    """The row of the snapshot and what follows it, on one line."""
    return " ".join(text[text.index("  snapshot  ") :].split())


def test_a_program_that_goes_on_exactly_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    losses, log, _ = experiment.lagom(train, config()).value
    assert len(losses) == len(log.splitlines()) == 8
    told = row(capfd.readouterr().err)
    assert told.startswith(
        "snapshot batch 2 of epoch 2 agrees: continues from there with the same bits, for 3 backwards"
    )
    assert [name for name in sorted(listdir()) if name != "runs"] == ["model-0.pt", "model-1.pt", "train.log"]
    assert [path.name for path in Path("runs").iterdir() if path.name.startswith(".")] == []


def test_a_program_that_would_go_on_otherwise_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VerificationError) as error:
        experiment.lagom(train, config(hparams={"by_process": True}))
    told = row(str(error.value))
    assert told.startswith(
        "snapshot batch 2 of epoch 2 DIFFERS: the program continues differently: losses, from backward"
    )
    assert "With snapshot_every_s=None (lagom run without --snapshot-every) it runs" in told
    assert listdir() == []


@pytest.mark.soak  # tests/extensions/resume/test_idioms.py has the reasons
def test_a_program_that_no_snapshot_can_be_taken_of_is_told_why_and_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(experiment.lagom(train, config(hparams={"in_thread": True})).value[0]) == 8
    told = row(capfd.readouterr().err)
    assert told.startswith("snapshot none the program has a thread, poller; meanwhile a run that loses a rank")


def test_a_run_that_has_no_folder_is_told_so_before_it_is_rehearsed() -> None:
    with pytest.raises(PlanError, match="snapshot_every_s needs a folder for the run"):
        experiment.lagom(train, TorchDistributedConfig(world_size=2, run_dir=None, verify=True, snapshot_every_s=1.0))
