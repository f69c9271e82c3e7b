"""A program that a test kills when it has a snapshot; run as a script, its process is the driver."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lagom.config import TorchDistributedConfig
from lagom.forward.rows import whole_batch

POINTS = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))


class Network(nn.Module):
    """Two layers, in float64, that count their forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        found: torch.Tensor = self.layers(x)
        return found


class Noisy(Dataset[Any]):
    """Random augmentation with the generators of torch, numpy and ``random``, and with one of its own."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.numbers = rows, np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        noise = float(np.random.rand()) + random.random() + float(self.numbers.random())
        return x + torch.rand(3, dtype=torch.float64) + noise, y, index


def epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, train_set: Any, number: int, folder: str, by_rows: bool
) -> float:
    total, rows = 0.0, open(f"{folder}/rows.csv", "a")  # noqa: SIM115  (open while batches are read)
    loader = DataLoader(Noisy(train_set), batch_size=4, shuffle=True, num_workers=2 * (number == 1))
    for step, (x, y, indices) in enumerate(loader):
        whole_batch.ALWAYS = by_rows  # in each step: another process may go on here
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
        rows.write(f"{number},{step},{indices.tolist()},{x.sum().item():.17g}\n")
        if number == 1:
            pause(folder, 0.3 * 2**step)
    rows.close()
    return total


def pause(folder: str, seconds: float) -> None:
    """Wait while the test waits for a snapshot, which may take 1% of the time only.

    Args:
        seconds: longest wait; a number in the file ``slowly`` takes its place.
    """
    start = time.monotonic()
    with suppress(FileNotFoundError):
        while time.monotonic() < start + float(Path(f"{folder}/slowly").read_text() or seconds):
            time.sleep(0.01)


def train_by_rows(train_set: Any, folder: str) -> dict[str, Any]:
    """Train a model whose rows ranks share out, however small it is."""
    return train(train_set, folder, Network().layers, by_rows=True)


def train(train_set: Any, folder: str, model: nn.Module | None = None, by_rows: bool = False) -> dict[str, Any]:
    """Train, print each epoch, and append each batch to a file."""
    model = model or Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    os.makedirs(f"{folder}/made")
    losses, noise = [], [random.random()]
    for number in range(3):
        losses.append(epoch(model, optimizer, train_set, number, folder, by_rows))
        noise.append(random.random())
        print(f"epoch {number}: {losses[-1]:.12g}")
    weights = [one.tolist() for one in model.state_dict().values()]
    found = {"losses": losses, "weights": weights, "random": torch.rand(2), "python": [random.random(), noise]}
    return found | {"device": str(next(model.parameters()).device)}


def train_as_on_a_gpu(train_set: Any, folder: str) -> dict[str, Any]:
    """Train, with snapshots that are not pickled in a fork, and that were taken on a GPU.

    These statements do not run again in a process that resumes, which is on the CPU.
    """
    from lagom.device_models import DeviceModel
    from lagom.extensions.resume import snapshot_taker

    model = DeviceModel(kind="cuda", name="NVIDIA H200", multiprocessors=132, driver="570.1")
    snapshot_taker.FORKED = ()
    vars(snapshot_taker).update(is_accelerator=lambda device: True, device_model=lambda device: model)
    return train(train_set, folder)


def short() -> int:
    """Return at once."""
    return 1


def config(folder: Path, **more: Any) -> TorchDistributedConfig:
    """The config of a run in ``folder``."""
    settings: dict[str, Any] = {
        "launcher": "local",
        "seed": 3,
        "run_dir": folder / "runs",
        "hparams": {"folder": str(folder)},
    }
    return TorchDistributedConfig(train_set=DATA, **(settings | more))


def newest(folder: Path) -> dict[str, Any]:
    """The description of the newest snapshot in ``folder``; empty if there is none."""
    found = sorted(folder.glob("runs/*/snapshots/snapshot-*.json"))
    return json.loads(found[-1].read_text()) if found else {}


if __name__ == "__main__":
    from lagom import experiment  # not in ranks, where it takes longer than the training
    from lagom.restart import snapshot_copies

    if sys.argv[2:]:
        snapshot_copies.EVERY_S = 0.2
    place = {"run_dir": sys.argv[2]} if sys.argv[2:] else {}
    experiment.lagom(train, config(Path(sys.argv[1]), world_size=2, snapshot_every_s=0.1, **place))
