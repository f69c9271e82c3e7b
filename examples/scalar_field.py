"""Trains a small network on the scalar field sin(y) + cos(x): once as plain PyTorch, once through lagom.

python examples/scalar_field.py                       # 2 ranks on Spark local[2]
python examples/scalar_field.py --launcher local      # 2 processes of this machine, no Spark
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Train the same function plainly and through lagom, and print losses and seconds."""
    args = _arguments(argv)
    train_set, test_set = scalar_field(args.points)
    hparams = {"epochs": args.epochs, "batch_size": 64, "lr": 1e-3}

    torch.manual_seed(0)
    start = time.perf_counter()
    plain_loss = train(Approximator, hparams, train_set, test_set)
    print(f"plain PyTorch: test loss {plain_loss:.6f} in {time.perf_counter() - start:.1f} s")

    config = TorchDistributedConfig(
        module=Approximator,
        hparams=hparams,
        train_set=train_set,
        test_set=test_set,
        world_size=args.world_size,
        launcher=args.launcher,
    )
    with _spark(args.world_size) if args.launcher == "spark" else contextlib.nullcontext():
        torch.manual_seed(0)  # ranks start from this process's generators, as a plain call does
        result = experiment.lagom(train, config)
    print(f"lagom, world size {result.world_size}: test loss {result['test result']:.6f} in {result.seconds:.1f} s")
    for rank, loss in enumerate(result.per_rank):
        print(f"  rank {rank} returned {loss:.6f}")


class Approximator(torch.nn.Module):
    """Maps a point to the field's value there, with three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 100),
            torch.nn.ReLU(),
            torch.nn.Linear(100, 100),
            torch.nn.ReLU(),
            torch.nn.Linear(100, 1),
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return values of shape (B,) at points of shape (B, 2)."""
        # With shape (B, 1), MSELoss would broadcast against targets of shape (B,) to (B, B), and nothing is learned.
        values: torch.Tensor = self.layers(points).squeeze(1)
        return values


def train(
    module: Callable[[], torch.nn.Module], hparams: Mapping[str, Any], train_set: TensorDataset, test_set: TensorDataset
) -> float:
    """Train with an ordinary loop for one process; return the mean squared error on ``test_set``."""
    model = module()
    optimizer = torch.optim.Adam(model.parameters(), lr=hparams["lr"])
    criterion = torch.nn.MSELoss()
    train_loader = DataLoader(train_set, batch_size=hparams["batch_size"], shuffle=True)
    test_loader = DataLoader(test_set, batch_size=hparams["batch_size"])

    for epoch in range(hparams["epochs"]):
        model.train()
        for points, values in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(points), values)
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            squares: list[float] = [((model(points) - values) ** 2).sum().item() for points, values in test_loader]
        test_loss = sum(squares) / len(test_set)
        print(f"epoch {epoch}: test loss {test_loss:.6f}")
    return test_loss


def scalar_field(num_points: int) -> tuple[TensorDataset, TensorDataset]:
    """Return random points (x, y) in [-5, 5] x [-5, 5] with sin(y) + cos(x): four fifths to train, one to test."""
    points = torch.rand((num_points, 2), generator=torch.Generator().manual_seed(0)) * 10 - 5
    values = torch.sin(points[:, 1]) + torch.cos(points[:, 0])
    cut = num_points * 4 // 5
    return TensorDataset(points[:cut], values[:cut]), TensorDataset(points[cut:], values[cut:])


@contextlib.contextmanager
def _spark(slots: int) -> Iterator[None]:
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        yield
        return
    builder = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", False)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    try:
        yield
    finally:
        session.stop()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn a scalar field, plainly and through lagom.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--points", type=int, default=10_000, help="10,000: 8,000 to train on, 2,000 to test")
    parser.add_argument("--world-size", type=int, help="number of ranks; 2, and 1 inline")
    parser.add_argument("--launcher", choices=["spark", "local", "inline"], default="spark")
    args = parser.parse_args(argv)
    if args.world_size is None:
        args.world_size = 1 if args.launcher == "inline" else 2
    return args


if __name__ == "__main__":
    main()
