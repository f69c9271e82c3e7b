"""An unmodified program for Maggy: a network learns a scalar field, first replicated, then with ZeRO.

lagom run -n 2 examples/maggy/scalar_field.py                     # 2 processes of this machine
lagom run -n 2 --master spark examples/maggy/scalar_field.py      # 2 ranks on Spark

The program does not import lagom: ``lagom run`` provides the module maggy. In a notebook, ``import lagom.compat.maggy``
does so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from maggy import experiment
from maggy.experiment_config import TorchDistributedConfig


class Surface(torch.nn.Module):
    """Maps points of the plane to heights above them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, width)
        self.middle = torch.nn.Linear(width, width)
        self.outer = torch.nn.Linear(width, 1)

    def forward(self, points: Any) -> Any:
        """Return heights of shape (B,) for points of shape (B, 2)."""
        return self.outer(torch.tanh(self.middle(torch.tanh(self.inner(points))))).squeeze(1)


def train(module: Any, hparams: Any, train_set: Any, test_set: Any) -> Any:
    """Train with a loop for one process; return the mean squared error on ``test_set``, as a tensor."""
    import torch

    model = module(hparams["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=hparams["lr"])
    squares = torch.nn.MSELoss()
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=100)

    for _ in range(hparams["epochs"]):
        model.train()
        for points, heights in train_loader:
            optimizer.zero_grad()
            loss = squares(model(points), heights)
            loss.backward()
            optimizer.step()

    model.eval()
    total = torch.zeros(())
    for points, heights in test_loader:
        total += squares(model(points).detach(), heights) * len(heights)
    return total / len(test_set)


def main(argv: Sequence[str] | None = None) -> None:
    """Train at two levels of ZeRO, and print the test loss of each."""
    parser = argparse.ArgumentParser(description="Learn a scalar field through Maggy's API.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--points", type=int, default=10_000)
    args = parser.parse_args(argv)

    points = torch.rand((args.points, 2), generator=torch.Generator().manual_seed(0)) * 10 - 5
    heights = torch.sin(points[:, 1]) + torch.cos(points[:, 0])
    cut = args.points * 4 // 5
    for level in (0, 2):
        config = TorchDistributedConfig(
            module=Surface,
            train_set=torch.utils.data.TensorDataset(points[:cut], heights[:cut]),
            test_set=torch.utils.data.TensorDataset(points[cut:], heights[cut:]),
            hparams={"width": 64, "lr": 3e-3, "epochs": args.epochs},
            zero_lvl=level,
        )
        result = experiment.lagom(train, config)
        print(f"zero_lvl={level}: test loss {float(result['test result']):.6f}")


if __name__ == "__main__":
    main()
