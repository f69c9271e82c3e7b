"""Trains a network on images that a Spark job wrote with petastorm: once as plain PyTorch, once through lagom.

python examples/petastorm.py                       # written by a Spark job, then 2 ranks on Spark local[2]
python examples/petastorm.py --launcher local      # written by a Spark job, then 2 processes of this machine

Petastorm's ``materialize_dataset`` writes the data set; ``import lagom.compat.petastorm`` makes petastorm 0.12.1 work
with today's pyarrow. lagom reads the data set without petastorm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import lagom.compat.petastorm  # noqa: F401  # before petastorm is imported
from lagom import PetastormDataLoader, experiment
from lagom.config import TorchDistributedConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the data sets, train the same function plainly and through lagom, and print losses and seconds."""
    args = _arguments(argv)
    hparams = {"epochs": args.epochs, "lr": 1e-2}
    with tempfile.TemporaryDirectory() as folder, _spark(args) as spark:
        train_set, test_set = f"{folder}/train", f"{folder}/test"
        materialise(spark, train_set, range(args.images * 4 // 5))
        materialise(spark, test_set, range(args.images * 4 // 5, args.images))

        torch.manual_seed(0)
        start = time.perf_counter()
        plain_loss = train(Classifier, hparams, train_set, test_set)
        print(f"plain PyTorch: test loss {plain_loss:.6f} in {time.perf_counter() - start:.1f} s")

        config = TorchDistributedConfig(
            module=Classifier,
            hparams=hparams,
            train_set=train_set,  # lagom passes a path to the function unchanged
            test_set=test_set,
            world_size=args.world_size,
            launcher=args.launcher,
        )
        torch.manual_seed(0)  # ranks start from this process's generators, as a plain call does
        result = experiment.lagom(train, config)
    print(f"lagom, world size {result.world_size}: test loss {result['test result']:.6f} in {result.seconds:.1f} s")


class Classifier(torch.nn.Module):
    """Scores images of 3 colours for 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 16 * 16, 4)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores of shape (B, 4) for images of shape (B, 3, 16, 16)."""
        scores: torch.Tensor = self.layers(images)
        return scores


def train(module: Callable[[], torch.nn.Module], hparams: Mapping[str, Any], train_set: str, test_set: str) -> float:
    """Train with an ordinary loop for one process; return the mean loss on ``test_set``."""

    def scaled(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": row["image"].astype(np.float32) / 255 - 0.5, "label": row["label"]}

    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams["lr"])
    train_loader = PetastormDataLoader(train_set, batch_size=64, transform_spec=scaled)
    test_loader = PetastormDataLoader(test_set, batch_size=64, transform_spec=scaled, shuffle=False)

    for epoch in range(hparams["epochs"]):
        model.train()
        for batch in train_loader:  # each epoch has another order
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            total, count = 0.0, 0
            for batch in test_loader:
                scores = model(batch["image"])
                total += torch.nn.functional.cross_entropy(scores, batch["label"], reduction="sum").item()
                count += len(batch["label"])
        print(f"epoch {epoch}: test loss {total / count:.6f}")
    return total / count


def materialise(spark: Any, path: str, numbers: range) -> None:
    """Write a data set with one image for each of ``numbers``, as programs for petastorm do."""
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql.types import LongType

    schema = Unischema(
        "Images",
        [
            UnischemaField("label", np.int64, (), ScalarCodec(LongType()), False),
            UnischemaField("image", np.uint8, (3, 16, 16), NdarrayCodec(), False),
        ],
    )

    def image(number: int) -> dict[str, Any]:
        random, label = np.random.default_rng(number), number % 4
        found = random.integers(0, 128, (3, 16, 16))
        found[:, 8 * (label // 2) :, 8 * (label % 2) :] += 64
        return {"label": np.int64(label), "image": found.astype(np.uint8)}

    with materialize_dataset(spark, f"file://{path}", schema, row_group_size_mb=1):
        rows = spark.sparkContext.parallelize(numbers, 4).map(image).map(lambda row: dict_to_spark_row(schema, row))
        spark.createDataFrame(rows, schema.as_spark_schema()).write.parquet(f"file://{path}")


@contextlib.contextmanager
def _spark(args: argparse.Namespace) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    # Otherwise Spark starts python3 from PATH, which may have no torch.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{max(2, args.world_size)}]").config("spark.ui.enabled", False)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn from petastorm's data sets, plainly and through lagom.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=2_000, help="2,000: 1,600 to train on, 400 to test")
    parser.add_argument("--world-size", type=int, help="number of ranks; 2, and 1 inline")
    parser.add_argument("--launcher", choices=["spark", "local", "inline"], default="spark")
    args = parser.parse_args(argv)
    if args.world_size is None:
        args.world_size = 1 if args.launcher == "inline" else 2
    return args


if __name__ == "__main__":
    main()
