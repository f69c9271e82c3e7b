"""The training programs that ``benchmarks.step`` times: one plain loop, by hand for DDP, and through Accelerate.

Run as ``python -m benchmarks.step_programs {ddp,accelerate} ARGUMENTS``, ARGUMENTS being JSON, it is the ranks' side.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARM_UP = 40
"""Steps that do not count."""


@dataclass(frozen=True)
class Task:
    """What is trained."""

    module: Callable[[], nn.Module]
    input: tuple[int, ...]
    output: tuple[int, ...]
    per_rank: int
    """Samples per rank and step."""
    steps: int
    """That are timed."""


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )


def _large() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 2500), nn.ReLU(), nn.Linear(2500, 2500), nn.ReLU(), nn.Linear(2500, 784))


TASKS = {
    "MLP 2-100-100-1": Task(_mlp, (2,), (1,), per_rank=64, steps=400),
    "CNN, 2 layers, 32x32": Task(_cnn, (3, 32, 32), (10,), per_rank=64, steps=60),
    "MLP of 10M parameters": Task(_large, (784,), (784,), per_rank=64, steps=25),
}


def plain(world_size: int, batch_is_ranks_own: bool, wanted: list[str]) -> dict[str, float]:
    """Seconds per step of each task: the loop that anybody would write."""
    torch.set_num_threads(1)
    found = {}
    for name in wanted:
        task = TASKS[name]
        model = task.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = task.per_rank * (1 if batch_is_ranks_own else world_size)
        loader = DataLoader(_data(task, world_size), batch_size=batch, shuffle=True)
        found[name] = _timed(task, loader, model, optimizer, lambda loss: loss.backward())
    return found


def ddp(world_size: int, wanted: list[str]) -> dict[str, float]:
    """The same, distributed by hand."""
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    for name in wanted:
        task = TASKS[name]
        torch.manual_seed(0)
        data = _data(task, world_size)
        model = nn.parallel.DistributedDataParallel(task.module())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(data, batch_size=task.per_rank, sampler=DistributedSampler(data))
        found[name] = _timed(task, loader, model, optimizer, lambda loss: loss.backward())
    torch.distributed.destroy_process_group()
    return found


def accelerate(world_size: int, wanted: list[str]) -> dict[str, float]:
    """The same, through Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    found = {}
    for name in wanted:
        task = TASKS[name]
        torch.manual_seed(0)
        model = task.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(_data(task, world_size), batch_size=task.per_rank, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found[name] = _timed(task, loader, model, optimizer, accelerator.backward)
    accelerator.end_training()
    return found


def _timed(task: Task, loader: Any, model: nn.Module, optimizer: Any, backward: Callable[[Tensor], object]) -> float:
    """Seconds from batch to batch: fetching it, forward, loss, backward, optimizer step; the median."""
    times: list[float] = []
    while len(times) <= WARM_UP + task.steps:
        for x, y in loader:
            times.append(time.perf_counter())
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            backward(loss)
            optimizer.step()
    steps = [after - before for before, after in pairwise(times)]
    return statistics.median(steps[WARM_UP : WARM_UP + task.steps])


def _data(task: Task, world_size: int) -> TensorDataset:
    """Enough for warm-up and 20 steps an epoch at least."""
    count = task.per_rank * world_size * min(task.steps, 100)
    return TensorDataset(torch.randn(count, *task.input), torch.randn(count, *task.output))


def main(kind: str, arguments: Mapping[str, Any]) -> None:
    """Be one rank of torchrun, or launch the ranks of Accelerate; each writes what it found to a file."""
    if kind == "ddp":
        _write(ddp, arguments)
    else:
        from accelerate import notebook_launcher

        notebook_launcher(
            _write, (accelerate, arguments), num_processes=arguments["world_size"], use_port=arguments["port"]
        )


def _write(program: Callable[[int, list[str]], dict[str, float]], arguments: Mapping[str, Any]) -> None:
    found = program(arguments["world_size"], arguments["wanted"])
    Path(arguments["folder"], os.environ["RANK"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
