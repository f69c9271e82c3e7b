"""Searches for the best network for the scalar field sin(y) + cos(x), then trains it once more.

python examples/search.py                       # 2 trials at a time on Spark local[2]
python examples/search.py --launcher local      # 2 processes of this machine, no Spark
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig

ACTIVATIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}


def main(argv: Sequence[str] | None = None) -> None:
    """Search, print the trials, and train with the best hyperparameters."""
    args = _arguments(argv)
    train_set, test_set = scalar_field(args.points)
    space = Searchspace(
        lr=("DOUBLE", [1e-4, 1e-1], "log"),
        units=("INTEGER", [16, 128]),
        depth=("DISCRETE", [1, 2, 3]),
        activation=("CATEGORICAL", list(ACTIVATIONS)),
    )
    config = HyperparameterOptConfig(
        searchspace=space,
        num_trials=args.trials,
        optimizer="tpe",
        direction="min",
        optimization_key="loss",  # train() logs no "loss", so lagom uses the mean training loss of each epoch
        es_policy="asha",
        hparams={"epochs": args.epochs, "batch_size": 64},
        train_set=train_set,
        test_set=test_set,
        seed=0,
        launcher=args.launcher,
    )
    with _spark(2) if args.launcher == "spark" else contextlib.nullcontext():
        result = experiment.lagom(train, config)
        print(result)
        again = TorchDistributedConfig(
            hparams=result.best_config,
            train_set=train_set,
            test_set=test_set,
            seed=0,
            world_size=1,
            launcher=args.launcher,
        )
        loss = experiment.lagom(train, again)["test result"]
    print(f"best of {len(result.trials)} trials: test loss {result.best_value:.6f} in {result.seconds:.1f} s")
    print(f"the same function with the best hyperparameters: test loss {loss:.6f} in one run")


def train(
    train_set: TensorDataset, test_set: TensorDataset, hparams: Mapping[str, Any], lr: float, activation: str
) -> float:
    """Train with an ordinary loop for one process; return the mean squared error on ``test_set``."""
    layers: list[torch.nn.Module] = [torch.nn.LazyLinear(hparams["units"]), ACTIVATIONS[activation]()]
    for _ in range(hparams["depth"] - 1):
        layers += [torch.nn.Linear(hparams["units"], hparams["units"]), ACTIVATIONS[activation]()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(hparams["units"], 1))
    model(train_set[:1][0])  # a first forward, which sets the width of the lazy first layer
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = torch.nn.MSELoss()
    for _ in range(hparams["epochs"]):
        for points, values in DataLoader(train_set, batch_size=hparams["batch_size"], shuffle=True):
            optimizer.zero_grad()
            criterion(model(points).squeeze(1), values).backward()
            optimizer.step()
    with torch.no_grad():
        points, values = test_set.tensors
        loss: float = criterion(model(points).squeeze(1), values).item()
    return loss


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
    parser = argparse.ArgumentParser(description="Search for the best network for a scalar field.")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--points", type=int, default=10_000, help="10,000: 8,000 to train on, 2,000 to test")
    parser.add_argument("--launcher", choices=["spark", "local", "inline"], default="spark")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
