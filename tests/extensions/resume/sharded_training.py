"""Programs whose state ranks shard (ZeRO), and that a test ends in the middle of their second epoch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.config import TorchDistributedConfig
from tests.extensions.resume.training import pause

WIDTH = 72
"""Width of the layers; its square is a parameter that level 3 shards."""
POINTS = torch.rand(48, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.square().sum(dim=1, keepdim=True))
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def backward(model: nn.Module, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(x) * scale.mean(), y)
    loss.backward()
    return loss


def train(train_set: Any, folder: str, name: str, dtype: str, accumulates: bool) -> dict[str, Any]:
    """Train, with a scheduler and a second optimizer that steps in the last epoch only; print each epoch.

    Args:
        accumulates: whether each step has the gradients of two batches, so that some are there between batches.
    """
    kind = getattr(torch, dtype)
    layers = nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh(), nn.Linear(WIDTH, 1)
    model = nn.Sequential(*layers).to(kind)
    scale = nn.Parameter(torch.ones(100, dtype=kind))
    optimizer = OPTIMIZERS[name](model.parameters())
    other = torch.optim.SGD([scale], lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for epoch in range(3):
        total = 0.0
        for step, (x, y) in enumerate(DataLoader(train_set, batch_size=4, shuffle=True)):
            x, y = x.to(kind), y.to(kind)
            if name == "lbfgs":
                optimizer.zero_grad()
                total += optimizer.step(lambda: backward(model, scale, x, y)).item()  # noqa: B023
            else:
                if not accumulates or step % 2 == 0:
                    optimizer.zero_grad()
                    other.zero_grad()
                total += backward(model, scale, x, y).item()
                if not accumulates or step % 2 == 1:
                    optimizer.step()
                    if epoch == 0:
                        other.step()
            if epoch == 1:
                pause(folder, 0.2 * 1.7**step)
        scheduler.step()
        losses.append(total)
        print(f"epoch {epoch}: {total:.12g}")
    state = optimizer.state_dict()["state"]
    moments = {key: one.tolist() for key, one in sorted(state.get(2, {}).items()) if isinstance(one, torch.Tensor)}
    weights = [one.tolist() for one in [*model.state_dict().values(), scale]]
    return {"losses": losses, "weights": weights, "moments": moments, "random": torch.rand(2).tolist()}


def config(folder: Path, name: str = "adamw", **more: Any) -> TorchDistributedConfig:
    """The config of a run in ``folder`` that trains with the optimizer ``name``."""
    os.makedirs(folder, exist_ok=True)
    hparams = {"folder": str(folder), "name": name, "dtype": "float32", "accumulates": False}
    hparams |= more.pop("hparams", {})
    settings: dict[str, Any] = {"launcher": "local", "seed": 3, "run_dir": folder / "runs", "hparams": hparams}
    return TorchDistributedConfig(train_set=DATA, **(settings | more))
