"""Runs the same training at each ``zero_lvl``, and prints the loss and the megabytes that each rank holds.

python examples/zero.py                               # 2 ranks on Spark local[2]
python examples/zero.py --launcher local              # 2 processes of this machine, no Spark
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig

LEVELS = (0, 1, 2, 3)
KINDS = (torch.Tensor, torch.nn.Parameter)
GRADIENT = vars(torch._C.TensorBase)["grad"]


def main(argv: Sequence[str] | None = None) -> None:
    """Train at each level; print the loss, and the megabytes of tensors that each rank holds before its last step."""
    args = _arguments(argv)
    with _spark(args.world_size) if args.launcher == "spark" else contextlib.nullcontext():
        for level in LEVELS:
            config = TorchDistributedConfig(
                hparams={"hidden": args.hidden, "epochs": args.epochs, "points": args.points},
                world_size=args.world_size,
                launcher=args.launcher,
                zero_lvl=level,
                seed=0,
            )
            result = experiment.lagom(train, config)
            loss = result.value[0]
            held = " and ".join(f"{megabytes:.2f}" for _, megabytes in result.per_rank)
            print(f"zero_lvl={level}, world size {result.world_size}: loss {loss:.6f}; ranks hold {held} MB")


def train(hidden: int, epochs: int, points: int) -> tuple[float, float]:
    """Train with an ordinary loop for one process; return the final loss, and the megabytes that the rank holds."""
    x = torch.rand(points, 2) * 10 - 5
    loader = DataLoader(TensorDataset(x, torch.sin(x[:, 1]) + torch.cos(x[:, 0])), batch_size=64, shuffle=True)
    layers = [torch.nn.Linear(2, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(hidden, 1), torch.nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    held = 0.0
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            held = held_megabytes()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        scheduler.step()
    with torch.no_grad():
        squares = sum(((model(inputs) - targets) ** 2).sum().item() for inputs, targets in loader)
    return squares / points, held


def held_megabytes() -> float:
    """Return the megabytes of all tensors that are alive in this process."""
    # Use torch's original functions below: with ZeRO, the tensor's own methods would gather a shard.
    found = [one for one in gc.get_objects() if type(one) in KINDS]
    gradients = [GRADIENT.__get__(one) for one in found if one.is_leaf]  # gc lists only gradients that Python has read
    every = found + [one for one in gradients if one is not None]
    storages = [torch._C.TensorBase.untyped_storage(one) for one in every]
    sizes: dict[int, int] = {one.data_ptr(): one.nbytes() for one in storages}
    return sum(sizes.values()) / 1e6


@contextlib.contextmanager
def _spark(slots: int) -> Iterator[None]:
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        yield
        return
    # Otherwise Spark starts python3 from PATH, which may have no torch.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", False)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    try:
        yield
    finally:
        session.stop()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One training at each zero_lvl.")
    parser.add_argument("--hidden", type=int, default=300, help="width of the network")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--world-size", type=int, help="number of ranks; 2, and 1 inline")
    parser.add_argument("--launcher", choices=["spark", "local", "inline"], default="spark")
    args = parser.parse_args(argv)
    if args.world_size is None:
        args.world_size = 1 if args.launcher == "inline" else 2
    return args


if __name__ == "__main__":
    main()
