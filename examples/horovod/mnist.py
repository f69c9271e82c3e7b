"""A script for horovodrun that learns digits, with Horovod's compression, Adasum, averaged metrics and checkpoints.

python examples/mnist_data.py /tmp/mnist --train 6000 --test 1000
lagom run -np 2 -H localhost:2 python examples/horovod/mnist.py --data /tmp/mnist --epochs 2 --fp16-allreduce
lagom run -np 2 --master spark examples/horovod/mnist.py --data /tmp/mnist --use-adasum
lagom run -np 2 python examples/horovod/mnist.py --data /tmp/mnist --checkpoint /tmp/mnist.pt    # run again to resume
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd  # isort: skip

parser = argparse.ArgumentParser(description="Digits, on many processes")
parser.add_argument("--data", default="/tmp/mnist", help="folder that has MNIST's files")
parser.add_argument("--batch-size", type=int, default=64, help="of each process")
parser.add_argument("--test-batch-size", type=int, default=500)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--no-cuda", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in half precision")
parser.add_argument("--use-adasum", action="store_true", help="gradients are added up adaptively")
parser.add_argument("--batches-per-allreduce", type=int, default=1, help="backwards before a step")
parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients; 0: any")
parser.add_argument("--checkpoint", help="file to resume from, if it is there, and to write; by default none")


class Net(nn.Module):
    """Two convolutions, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Any) -> Any:
        """Return log-probabilities of shape (B, 10) for images of shape (B, 1, 28, 28)."""
        images = functional.relu(functional.max_pool2d(self.conv1(images), 2))
        images = functional.relu(functional.max_pool2d(self.dropout(self.conv2(images)), 2))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(images.flatten(1)))), dim=1)


def digits(folder: str, train: bool) -> Any:
    """Return torchvision's MNIST; without torchvision, a data set that reads the same files."""
    try:
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from examples.mnist_data import MNIST

        return MNIST(folder, train, transform=lambda image: (image - 0.1307) / 0.3081)
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    return datasets.MNIST(folder, train=train, download=True, transform=transforms.Compose(steps))


def metric_average(value: float, name: str) -> float:
    """Return the mean of ``value`` over the processes."""
    return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name))


def train(epoch: int, model: Any, optimizer: Any, loader: Any, device: Any) -> None:
    """Train for one pass over this process's samples."""
    model.train()
    loader.sampler.set_epoch(epoch)
    per_step = args.batches_per_allreduce
    for index, (images, labels) in enumerate(loader):
        if index % per_step == 0:
            optimizer.zero_grad()
        loss = functional.nll_loss(model(images.to(device)), labels.to(device)) / per_step
        loss.backward()
        if (index + 1) % per_step == 0 or index + 1 == len(loader):
            step(model, optimizer)
        if index % 20 == 0:
            print(f"epoch {epoch}, batch {index} of {len(loader)}: loss {loss.item() * per_step:.4f}")


def step(model: Any, optimizer: Any) -> None:
    """Step the optimizer; with ``--clip``, first average the gradients over all processes and clip them."""
    if not args.clip:
        optimizer.step()
        return
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    with optimizer.skip_synchronize():
        optimizer.step()


def test(model: Any, loader: Any, device: Any) -> tuple[float, float]:
    """Return loss and accuracy over the samples of all processes."""
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images.to(device))
            loss += functional.nll_loss(output, labels.to(device), reduction="sum").item()
            correct += output.argmax(1).cpu().eq(labels).sum().item()
    num = len(loader.sampler)
    return metric_average(loss / num, "avg_loss"), metric_average(correct / num, "avg_accuracy")


def sampled(data: Any, batch_size: int, workers: dict[str, Any]) -> Any:
    """Return a loader of this process's samples."""
    sampler: Iterable[int] = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(data, batch_size=batch_size, sampler=sampler, **workers)


def main() -> None:
    """Train and test, on all processes that were started."""
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if not args.no_cuda and torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda")
    torch.set_num_threads(1)
    workers: dict[str, Any] = {"num_workers": 1, "pin_memory": True} if device.type == "cuda" else {}
    loader = sampled(digits(args.data, train=True), args.batch_size, workers)
    test_loader = sampled(digits(args.data, train=False), args.test_batch_size, workers)

    model = Net().to(device)
    scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
    if args.use_adasum and hvd.nccl_built():
        scaler = args.batches_per_allreduce * hvd.local_size()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=args.lr * scaler, momentum=args.momentum)
    done = 0
    if hvd.rank() == 0 and args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epoch"]
    done = hvd.broadcast_object(done, root_rank=0, name="epoch")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    for epoch in range(done + 1, done + args.epochs + 1):
        train(epoch, model, optimizer, loader, device)
        loss, accuracy = test(model, test_loader, device)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {100 * accuracy:.2f}%")
            if args.checkpoint:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(saved, args.checkpoint)


if __name__ == "__main__":
    args = parser.parse_args()
    main()
