"""A HorovodRunner notebook, unmodified: ``train`` is for one process, ``train_hvd`` is its version for Horovod.

python examples/horovod/notebook.py                               # 2 ranks on Spark local[2]
python examples/horovod/notebook.py --launcher local              # 2 processes of this machine, no Spark
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lagom.compat.horovod  # noqa: F401  # the only new line: it provides Horovod's modules
from examples import mnist_data
from lagom import experiment
from lagom.config import TorchDistributedConfig

import horovod.torch as hvd  # isort: skip
from sparkdl import HorovodRunner  # isort: skip

batch_size = 100
num_epochs = 2
momentum = 0.5
data_dir = checkpoint_dir = ""  # set by main


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)])
        self.hidden = nn.Linear(320, 50)
        self.classes = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of shape (B, 10) for images of shape (B, 1, 28, 28)."""
        for convolution in self.convolutions:
            images = functional.relu(functional.max_pool2d(convolution(images), 2))
        hidden = functional.dropout(functional.relu(self.hidden(images.flatten(1))), training=self.training)
        return functional.log_softmax(self.classes(hidden), dim=1)


def normalized(image: torch.Tensor) -> torch.Tensor:
    """Normalize an image with the mean and standard deviation of MNIST."""
    return (image - 0.1307) / 0.3081


def train_one_epoch(model: Any, device: Any, loader: Any, optimizer: Any) -> None:
    """Train for one pass over ``loader``."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()


def final_loss(model: Any, device: Any, data: Any) -> float:
    """Return the mean loss over ``data``."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(data, batch_size=500):
            total += functional.nll_loss(model(images.to(device)), labels.to(device), reduction="sum").item()
    return total / len(data)


def save_checkpoint(model: Any, optimizer: Any, epoch: int) -> None:
    """Save model and optimizer in a file for this epoch."""
    os.makedirs(checkpoint_dir, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{checkpoint_dir}/checkpoint-{epoch}.pt")


def train(learning_rate: float) -> float:
    """Train for one process; this is the notebook's cell for a single node."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = mnist_data.MNIST(data_dir, train=True, download=True, transform=normalized)
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    for epoch in range(1, num_epochs + 1):
        train_one_epoch(model, device, loader, optimizer)
        save_checkpoint(model, optimizer, epoch)
    return final_loss(model, device, data)


def train_hvd(learning_rate: float) -> tuple[int, float]:
    """Train with Horovod, as the migrated cell does; return the number of ranks and the loss."""
    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    data = mnist_data.MNIST(data_dir, train=True, download=True, transform=normalized)
    sampler: Any = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(1, num_epochs + 1):
        train_one_epoch(model, device, loader, optimizer)
        if hvd.rank() == 0:
            save_checkpoint(model, optimizer, epoch)
    return hvd.size(), final_loss(model, device, data)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``train`` plainly and through lagom, and ``train_hvd`` with HorovodRunner; print losses and seconds."""
    args = _arguments(argv)
    with contextlib.ExitStack() as stack:
        compare(args, Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory())).resolve())


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Run all three from the same seed, with data and checkpoints in ``folder``."""
    global num_epochs, data_dir, checkpoint_dir  # the notebook's variables
    num_epochs = args.epochs
    data_dir, checkpoint_dir = str(folder / "data"), str(folder / "checkpoints")
    mnist_data.write(Path(data_dir), args.images, num_test=10)
    config = TorchDistributedConfig(
        hparams={"learning_rate": 0.01}, world_size=args.world_size, launcher=args.launcher, run_dir=None
    )
    with _spark(args.world_size) if args.launcher == "spark" else contextlib.nullcontext():
        runs: dict[str, Callable[[], Any]] = {
            "train, plain": lambda: (1, train(learning_rate=0.01)),
            "train, lagom": lambda: (args.world_size, experiment.lagom(train, config).value),
            "train_hvd": lambda: HorovodRunner(np=_np(args)).run(train_hvd, learning_rate=0.01),
        }
        for name, run in runs.items():
            torch.manual_seed(0)
            began = time.monotonic()
            world_size, loss = run()
            saved = len(list(Path(checkpoint_dir).glob("checkpoint-*.pt")))
            print(
                f"{name}, world size {world_size}: loss {loss:.4f} in {time.monotonic() - began:.1f} s; {saved} saved"
            )
    print(
        "train gives one number wherever it runs; train_hvd has batches and a learning rate of its own, twice as large"
    )


def _np(args: argparse.Namespace) -> int:
    return int(args.world_size) if args.launcher == "spark" else -int(args.world_size)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=6000, help="for training")
    parser.add_argument("--folder", help="where data and checkpoints go and stay; by default one that is removed")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--launcher", default="spark", choices=("spark", "local"))
    return parser.parse_args(argv)


def _spark(slots: int) -> contextlib.AbstractContextManager[object]:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = SparkSession.builder.master(f"local[{slots}]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


if __name__ == "__main__":
    main()
