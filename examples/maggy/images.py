"""An unmodified program for Maggy: it learns from images in Parquet, with a transform and the older GradScaler.

lagom run -n 2 examples/maggy/images.py                     # 2 processes of this machine
lagom run -n 2 --master spark examples/maggy/images.py      # 2 ranks on Spark

The program does not import lagom: ``lagom run`` provides the module maggy. The program makes its own data sets. Data
sets that petastorm wrote are read in the same way; petastorm need not be installed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from maggy.config import TorchDistributedConfig
from maggy.experiment import experiment


def train(module: Any, dataset: Any, hparams: Any, reporter: Any) -> Any:
    """Train for one process; return the accuracy on the test images."""
    import warnings

    import torch
    from maggy.core.patching import MaggyPetastormDataLoader

    def scaled(row: Any) -> Any:
        return {"image": row["image"].astype("float32").reshape(1, 12, 12) / 255 - 0.5, "label": row["label"]}

    model = module(num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams["lr"], momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both names are deprecated, and warn without a GPU
        scaler, autocast = torch.cuda.amp.GradScaler(), torch.cuda.amp.autocast()
    train_loader = MaggyPetastormDataLoader(dataset[0], batch_size=32, transform_spec=_on_frames(scaled))
    test_loader = MaggyPetastormDataLoader(dataset[1], batch_size=32, transform_spec=_on_frames(scaled))

    for epoch in range(hparams["epochs"]):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            with autocast:
                loss = criterion(model(batch["image"]), batch["label"].long())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        reporter.broadcast(metric=float(loss.detach()), step=epoch)

    model.eval()
    right = seen = 0
    with torch.no_grad():
        for batch in test_loader:
            right += int((model(batch["image"]).argmax(dim=1) == batch["label"]).sum())
            seen += len(batch["label"])
    return {"accuracy": right / seen}


def _on_frames(change: Any) -> Any:
    """Return a transform that applies ``change`` to each row of a DataFrame.

    A transform gets DataFrames if petastorm did not write the Parquet files, and single rows if it did.
    """

    def changed(frame: Any) -> Any:
        rows = [change(row) for row in frame.to_dict("records")]
        return type(frame)({name: [row[name] for row in rows] for name in rows[0]})

    return changed


def small_network(num_classes: int) -> Any:
    """Return a module. Maggy accepts a function that makes a module, or a class."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(800, num_classes)
    )


def write(folder: str, numbers: range) -> str:
    """Write an image for each of ``numbers``: one quadrant is lighter, and its number is the label."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    os.makedirs(folder)
    images = []
    for number in numbers:
        image = np.random.default_rng(number).integers(0, 160, (12, 12))
        image[6 * (number % 4 // 2) :, 6 * (number % 2) :][:6, :6] += 80
        images.append(image.astype(np.uint8).reshape(-1))
    table = pa.table({"image": pa.array(images, pa.list_(pa.uint8(), 144)), "label": [n % 4 for n in numbers]})
    pq.write_table(table, f"{folder}/part-0.parquet", row_group_size=64)
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    """Write the data sets, train, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Learn from images in Parquet through Maggy's API.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=1000)
    args = parser.parse_args(argv)
    cut = args.images * 4 // 5
    with tempfile.TemporaryDirectory() as folder:
        sets = [write(f"{folder}/train", range(cut)), write(f"{folder}/test", range(cut, args.images))]
        config = TorchDistributedConfig(small_network, sets, {"lr": 0.02, "epochs": args.epochs}, name="images")
        result = experiment.lagom(train, config)
    print(f"accuracy {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
