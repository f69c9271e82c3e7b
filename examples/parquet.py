"""Trains a network on a folder of Parquet that Spark wrote: once as plain PyTorch, once through lagom.

python examples/parquet.py                       # the data set made by a Spark job, then 2 ranks on Spark local[2]
python examples/parquet.py --launcher local      # made by pyarrow, then 2 processes of this machine, no Spark
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lagom import PetastormDataLoader, experiment
from lagom.config import TorchDistributedConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the data sets, train the same function plainly and through lagom, and print losses and seconds."""
    args = _arguments(argv)
    hparams = {"epochs": args.epochs, "batch_size": 64, "lr": 1e-3}
    with tempfile.TemporaryDirectory() as folder, _spark(args) as spark:
        train_set, test_set = f"{folder}/train", f"{folder}/test"
        for path, count, seed in ((train_set, args.points * 4 // 5, 1), (test_set, args.points // 5, 2)):
            (_write if spark is None else _write_with(spark))(path, count, seed)

        torch.manual_seed(0)
        start = time.perf_counter()
        plain_loss = train(Approximator, hparams, train_set, test_set)
        print(f"plain PyTorch: test loss {plain_loss:.6f} in {time.perf_counter() - start:.1f} s")

        config = TorchDistributedConfig(
            module=Approximator,
            hparams=hparams,
            train_set=train_set,  # lagom passes a path to the function unchanged
            test_set=test_set,
            world_size=args.world_size,
            launcher=args.launcher,
        )
        torch.manual_seed(0)  # ranks start from this process's generators, as a plain call does
        result = experiment.lagom(train, config)
    print(f"lagom, world size {result.world_size}: test loss {result['test result']:.6f} in {result.seconds:.1f} s")


class Approximator(torch.nn.Module):
    """Maps a point to the field's value there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return values of shape (B,) at points of shape (B, 2)."""
        values: torch.Tensor = self.layers(points).squeeze(1)
        return values


def train(module: Callable[[], torch.nn.Module], hparams: Mapping[str, Any], train_set: str, test_set: str) -> float:
    """Train with an ordinary loop for one process; return the mean squared error on ``test_set``."""
    model = module()
    optimizer = torch.optim.Adam(model.parameters(), lr=hparams["lr"])
    train_loader = PetastormDataLoader(train_set, batch_size=hparams["batch_size"])
    test_loader = PetastormDataLoader(test_set, batch_size=hparams["batch_size"], shuffle=False)

    for epoch in range(hparams["epochs"]):
        model.train()
        for batch in train_loader:  # each epoch has another order
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["point"].float()), batch["value"].float())
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            squares, count = 0.0, 0
            for batch in test_loader:
                squares += ((model(batch["point"].float()) - batch["value"].float()) ** 2).sum().item()
                count += len(batch["value"])
        print(f"epoch {epoch}: test loss {squares / count:.6f}")
    return squares / count


def _write_with(spark: Any) -> Callable[[str, int, int], None]:
    from pyspark.sql import functions as f

    def write(path: str, count: int, seed: int) -> None:
        x, y = (f.rand(seed + number) * 10 - 5 for number in (0, 100))
        points = spark.range(0, count, numPartitions=4).select(x.alias("x"), y.alias("y"))
        value = (f.sin("y") + f.cos("x")).alias("value")
        points.select(f.array("x", "y").alias("point"), value).write.parquet(path)

    return write


def _write(path: str, count: int, seed: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    points = np.random.default_rng(seed).random((count, 2)) * 10 - 5
    Path(path).mkdir()
    for part, some in enumerate(np.array_split(points, 4)):
        value = np.sin(some[:, 1]) + np.cos(some[:, 0])
        pq.write_table(pa.table({"point": list(some), "value": value}), f"{path}/part-{part}.parquet")


@contextlib.contextmanager
def _spark(args: argparse.Namespace) -> Iterator[Any]:
    if args.launcher != "spark":
        yield None
        return
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    # Otherwise Spark starts python3 from PATH, which may have no torch.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{args.world_size}]").config("spark.ui.enabled", False)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn from Parquet, plainly and through lagom.")
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
