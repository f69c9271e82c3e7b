"""Measures samples per second of HorovodRunner's MNIST notebook: in one process, with DDP and with lagom on 2 ranks.

    python -m benchmarks.mnist [--samples 60000] [--repeats 3]

The network, the loss, the optimizer and the batches of 100 samples per process are those of the notebook. Images have
MNIST's format and are made here (examples/mnist_data.py). lagom runs the single-process function twice: with
``batches="per_rank"``, and with its defaults, which keep the batches and the numbers of one process. Each contender
trains for one epoch in new processes; contenders run one after the other, in alternating order. The first batches of
the epoch do not count. Ranks have one thread; the single process runs with one thread, and again with torch's default.

The notebook reports 118.2 s for one node and 96.6 s for two workers on CPUs: 1.22 times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from examples.mnist_data import MNIST, write
from lagom import experiment
from lagom.config import TorchDistributedConfig

WORLD_SIZE = 2
BATCH_SIZE = 100
WARM_UP = 10
"""Batches at the start that do not count."""
WANTED = 1.8
"""Target on two free cores: lagom's samples per second, divided by those of one process with one thread."""
CONTENDERS = {
    "one": "one process, one thread",
    "threads": "one process, torch's default threads",
    "ddp": "DDP by hand, 2 ranks, gloo",
    "gloo": "lagom, 2 ranks, gloo",
    "memory": "lagom, 2 ranks, shared memory",
    "default": "lagom, 2 ranks, one process's batches",
}
Span = tuple[float, float, int]
"""A rank's measurement: start of its first counted batch, end of its last batch, and samples between these times."""


class Net(nn.Module):
    """Two convolutions and two linear layers, from images (B, 1, 28, 28) to log-probabilities (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Any) -> Any:
        """Return log-probabilities of shape (B, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print samples per second; return 0 if the targets hold, else 1."""
    args = _arguments(argv)
    if args.contender:
        print(json.dumps(_spans(args.contender, args.data)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.samples, 100)
        rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for number in range(args.repeats):
            for name in list(CONTENDERS) if number % 2 == 0 else reversed(CONTENDERS):
                rates[name].append(_rate(name, folder))
                print(f"{CONTENDERS[name]}: {rates[name][-1]:.0f} samples/s", file=sys.stderr)
    print(_report(rates, args.samples))
    return 0 if all(held for _, held in _targets(rates)) else 1


def _report(rates: Mapping[str, Sequence[float]], samples: int) -> str:
    lines = [f"{f'MNIST, {samples} samples, batches of {BATCH_SIZE}':38} samples/s  least  most   of one thread"]
    one = statistics.median(rates["one"])
    for name, found in rates.items():
        median = statistics.median(found)
        lines.append(f"{CONTENDERS[name]:38} {median:9.0f} {min(found):6.0f} {max(found):6.0f} {median / one:9.2f}x")
    lines += [f"{'holds' if held else 'MISSED':7}{target}" for target, held in _targets(rates)]
    best, threads = statistics.median(rates["memory"]), statistics.median(rates["threads"])
    lines.append(
        f"{'':7}{best / threads:.2f} times one process with torch's default threads; the notebook reports 1.22"
    )
    return "\n".join(lines)


def _targets(rates: Mapping[str, Sequence[float]]) -> list[tuple[str, bool]]:
    one = statistics.median(rates["one"])
    return [
        (f"{CONTENDERS[name]}: at least {WANTED} times one thread", statistics.median(rates[name]) >= WANTED * one)
        for name in ("gloo", "memory", "default")
    ]


def _rate(contender: str, folder: str) -> float:
    """Return the samples per second of all ranks of ``contender``, run in a new process."""
    env = dict(os.environ)
    env.pop("OMP_NUM_THREADS", None)
    if contender != "threads":
        env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "benchmarks.mnist", "--contender", contender, "--data", folder]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    spans = json.loads(done.stdout.splitlines()[-1])
    starts, ends, counts = zip(*spans, strict=True)
    return float(sum(counts) / (max(ends) - min(starts)))


def _spans(contender: str, folder: str) -> list[Span]:
    """Run ``contender``, and return the measurement of each rank."""
    if contender in ("one", "threads"):
        return [train(folder, 0.001)]
    if contender == "ddp":
        return _by_hand(folder)
    config = TorchDistributedConfig(
        hparams={"folder": folder, "learning_rate": 0.001},
        world_size=WORLD_SIZE,
        launcher="local",
        seed=0,
        batches="whole" if contender == "default" else "per_rank",
        collectives="gloo" if contender == "gloo" else "auto",
        run_dir=None,
    )
    spans = list(experiment.lagom(train, config).per_rank)
    return spans[:1] if contender == "default" else spans  # by default every rank sees, and counts, all samples


def train(folder: str, learning_rate: float) -> Span:
    """Train for one epoch as the notebook's function for a single node does."""
    loader = DataLoader(MNIST(folder, transform=_normalised), batch_size=BATCH_SIZE, shuffle=True)
    return _epoch(Net(), loader, learning_rate)


def _epoch(model: nn.Module, loader: DataLoader[Any], learning_rate: float) -> Span:
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.5)
    model.train()
    count, start = 0, time.monotonic()
    for number, (data, target) in enumerate(loader):
        if number == WARM_UP:
            count, start = 0, time.monotonic()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        count += len(data)
        if number % 100 == 0:
            loss.item()  # the notebook prints the loss here
    return start, time.monotonic(), count


def _normalised(image: Any) -> Any:
    return (image - 0.1307) / 0.3081


def _by_hand(folder: str) -> list[Span]:
    """Start DDP's ranks as torchrun would, and return their measurements."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_ddp_rank, args=(rank, port, folder, queue)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    spans = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return spans


def _ddp_rank(rank: int, port: int, folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    url = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    data = MNIST(folder, transform=_normalised)
    sampler: Any = DistributedSampler(data)
    sampler.set_epoch(1)
    model = nn.parallel.DistributedDataParallel(Net())
    queue.put(_epoch(model, DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler), 0.001))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Samples per second of HorovodRunner's MNIST notebook.")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3, help="epochs of each contender; medians are told")
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
