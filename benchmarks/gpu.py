"""Measures what lagom adds to a training step on one GPU, beside DDP by hand (NCCL) and Accelerate, on one rank each.

    python -m benchmarks.gpu [--starts 3] [--only lagom ddp accelerate]

All contenders run the same loop with SGD, on batches that are on the GPU already: an MLP in float32, ResNet-50 in
bfloat16 with channels_last, and GPT-2 124M in bfloat16. The plain loop and each contender take turns, each start in a
process of its own. Steps are timed in blocks, since the clock must wait for the GPU at the end of a block. A figure is
the median over starts of the median over blocks; "added" is the time of a step less the time of the plain loop's step.
Accelerate runs if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu_models import GPT2, resnet50
from lagom import experiment
from lagom.config import TorchDistributedConfig

CONTENDERS = {"plain": "plain", "lagom": "lagom", "ddp": "DDP by hand", "accelerate": "Accelerate"}
LARGE_MS = 20.0
"""For a plain step of at least this time, lagom may add the share ``MOST_SHARE``; for a shorter step, ``MOST_US``."""
MOST_US, MOST_SHARE = 60.0, 0.01


@dataclass(frozen=True)
class Task:
    """A model, a batch for it, and how many steps are one block."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int
    half: bool
    blocks: int = 9


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1))


def _images() -> tuple[Tensor, Tensor]:
    images = torch.randn(128, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return images, torch.randint(1000, (128,), device="cuda")


def _texts() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(50257, (8, 1025), device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


TASKS = {
    "MLP 2-100-100-1": Task(
        _mlp, lambda: (torch.randn(128, 2).cuda(), torch.randn(128, 1).cuda()), F.mse_loss, 200, False
    ),
    "ResNet-50, 128 images": Task(
        lambda: resnet50().to(memory_format=torch.channels_last),  # type: ignore[call-overload]  # not in torch's types
        _images,
        F.cross_entropy,
        5,
        True,
    ),
    "GPT-2 124M, 8 x 1024 tokens": Task(GPT2, _texts, _token_loss, 5, True),
}


class Repeated(Dataset[Any]):
    """A data set in which every item is the same batch, so that loading takes no time."""

    def __init__(self, batch: tuple[Tensor, Tensor], count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batch


def train() -> dict[str, list[float]]:
    """Train all tasks with an ordinary loop; return the seconds of a step in each block, by task."""
    return {name: _train(task, lambda model: model, lambda loss: loss.backward()) for name, task in TASKS.items()}


def _train(task: Task, prepare: Callable[[nn.Module], nn.Module], backward: Callable[[Tensor], object]) -> list[float]:
    torch.manual_seed(0)
    model = prepare(task.model().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count = task.steps * (task.blocks + 3)
    times, start = [], 0.0
    for number, (x, y) in enumerate(DataLoader(Repeated(task.batch(), count), batch_size=None)):
        if number % task.steps == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            times.append((now - start) / task.steps)
            start = now
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=task.half):
            loss = task.loss(model(x), y)
        backward(loss)
        optimizer.step()
    return times[3:]  # the first has no start time; in the next two, libraries choose their kernels


def by_lagom() -> dict[str, list[float]]:
    """Run the ordinary loop on one rank by lagom."""
    logging.getLogger("lagom").setLevel(logging.ERROR)
    found: dict[str, list[float]] = experiment.lagom(
        train, TorchDistributedConfig(world_size=1, launcher="local")
    ).value
    return found


def ddp() -> dict[str, list[float]]:
    """Train all tasks with DistributedDataParallel over NCCL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel
        return {name: _train(task, wrapped, lambda loss: loss.backward()) for name, task in TASKS.items()}
    finally:
        torch.distributed.destroy_process_group()


def accelerate() -> dict[str, list[float]]:
    """Train all tasks with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    return {name: _train(task, accelerator.prepare, accelerator.backward) for name, task in TASKS.items()}


RUN = {"plain": train, "lagom": by_lagom, "ddp": ddp, "accelerate": accelerate}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table; return 0 if lagom's targets hold, else 1."""
    args = _arguments(argv)
    if args.contender:
        print(json.dumps(RUN[args.contender]()), file=os.fdopen(args.to, "w"))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    wanted = ["plain", *args.only]
    if importlib.util.find_spec("accelerate") is None and "accelerate" in wanted:
        wanted.remove("accelerate")
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    for number in range(args.starts):
        for name in wanted if number % 2 else reversed(wanted):
            starts[name].append({task: statistics.median(times) for task, times in _measured(name).items()})
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.starts} starts")
    print(f"{'':30}{'ms a step':>12}{'least':>10}{'most':>10}{'added us':>12}{'added':>8}")
    print("\n".join(_rows(starts)))
    held = all(_holds(starts, task) for task in TASKS)
    target = f"lagom adds at most {MOST_US:.0f} us, from {LARGE_MS:.0f} ms on {MOST_SHARE:.0%}"
    print(f"{'holds' if held else 'MISSED'}: {target}")
    return 0 if held else 1


def _measured(name: str) -> dict[str, list[float]]:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "benchmarks.gpu", "--contender", name, "--to", str(writer)]
    process = subprocess.Popen(command, pass_fds=[writer], stdout=subprocess.DEVNULL)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    if process.wait() != 0:
        raise RuntimeError(f"{CONTENDERS[name]} ended with status {process.returncode}")
    found: dict[str, list[float]] = json.loads(text)
    return found


def _rows(starts: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    for task in TASKS:
        yield task
        plain = _median(starts["plain"], task)
        for name, found in starts.items():
            times = [1e3 * one[task] for one in found]
            added = _median(found, task) - plain
            figures = f"{statistics.median(times):12.3f}{min(times):10.3f}{max(times):10.3f}"
            more = "" if name == "plain" else f"{1e6 * added:12.1f}{added / plain:8.1%}"
            yield f"  {CONTENDERS[name]:28}{figures}{more}"


def _holds(starts: dict[str, list[dict[str, float]]], task: str) -> bool:
    plain = _median(starts["plain"], task)
    if "lagom" not in starts:
        return True
    added = _median(starts["lagom"], task) - plain
    return added <= (MOST_SHARE * plain if 1e3 * plain >= LARGE_MS else MOST_US / 1e6)


def _median(found: list[dict[str, float]], task: str) -> float:
    return statistics.median(one[task] for one in found)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a step on one GPU, beside a plain loop.")
    parser.add_argument("--starts", type=int, default=3, help="how often each is started")
    parser.add_argument("--only", nargs="*", default=["lagom", "ddp", "accelerate"], choices=list(CONTENDERS)[1:])
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--to", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
