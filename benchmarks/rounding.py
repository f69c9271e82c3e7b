"""Shows how rounding grows in training: the loss of a small contrastive network, beside the same run in one process.

    python -m benchmarks.rounding [--steps 30]

Adam amplifies differences of gradients that are close to zero, and BatchNorm those of small variances. Rows: two ranks,
and as a control one process with another number of threads, which adds the same floats in another order. Columns: the
relative difference of the loss after some steps, in float32 and float64.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

SHOWN = (1, 6, 30)
"""Steps whose losses are shown."""


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args(argv).steps
    shown = [step for step in SHOWN if step <= steps]
    print(f"{'':34}" + "".join(f"{f'{name}, step {step}':>20}" for name in ("float32", "float64") for step in shown))
    runs: dict[str, dict[str, Any]] = {
        "2 ranks": {"world_size": 2},
        "one process, 1 thread instead of 2": {"world_size": 1, "threads": 1},
    }
    plain = {dtype: losses(dtype, steps, world_size=1) for dtype in (torch.float32, torch.float64)}
    for name, settings in runs.items():
        errors = []
        for dtype, expected in plain.items():
            found = losses(dtype, steps, **settings)
            errors += [abs(found[step - 1] / expected[step - 1] - 1) for step in shown]
        print(f"{name:34}" + "".join(f"{error:20.0e}" for error in errors), flush=True)
    return 0


def losses(dtype: torch.dtype, steps: int, world_size: int, threads: int = 2) -> list[float]:
    """Return the loss of each step; ``threads`` are those of one process."""
    hparams = {"dtype": dtype, "steps": steps, "threads": threads if world_size == 1 else 1}
    config = TorchDistributedConfig(launcher="local", seed=0, hparams=hparams, world_size=world_size)
    found: list[float] = experiment.lagom(train, config).value
    return found


def train(dtype: torch.dtype, steps: int, threads: int) -> list[float]:
    """Train a small residual network by SimCLR's loss on two noisy views of random pictures; return the losses."""
    torch.set_num_threads(threads)
    pictures = torch.rand(256, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    net = Net().to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    found: list[float] = []
    while len(found) < steps:
        for (x,) in DataLoader(TensorDataset(pictures), batch_size=32, shuffle=True):
            noise = torch.Generator().manual_seed(len(found))
            views = [x + 0.1 * torch.randn(x.shape, generator=noise, dtype=torch.float64).to(dtype) for _ in range(2)]
            loss = contrast(net(torch.cat(views)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found[:steps]


class Net(nn.Module):
    """A small residual network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(4)
        )
        self.head = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Any:
        """Return features of shape (batch, 32) for pictures of shape (batch, 3, height, width)."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def contrast(features: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the NT-Xent loss of two views, one below the other (Chen et al. 2020, https://arxiv.org/abs/2002.05709)."""
    unit = F.normalize(features, dim=1)
    likeness = unit @ unit.T / temperature
    likeness = likeness.masked_fill(torch.eye(len(unit), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(likeness, torch.arange(len(unit)).roll(len(unit) // 2))


if __name__ == "__main__":
    raise SystemExit(main())
