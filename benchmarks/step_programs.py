"""The training programs that ``benchmarks.step`` times: a plain loop, DDP by hand, and Accelerate.

``python -m benchmarks.step_programs CONTENDER ARGUMENTS`` starts the ranks of one contender; ARGUMENTS is JSON. The
benchmark tells the ranks over a socket when to run their next steps.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig

Arguments = Mapping[str, Any]
"""The settings port, world_size, tasks (names), turns and contender."""


@dataclass(frozen=True)
class Task:
    """A model, its shapes, and the number of samples and steps."""

    module: Callable[[], nn.Module]
    input: tuple[int, ...]
    output: tuple[int, ...]
    per_rank: int
    """Samples per rank and step."""
    steps: int
    """Steps of a turn."""


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 1))


def _cnn() -> nn.Module:
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 8 * 8, 10))


def _large() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 2500), nn.ReLU(), nn.Linear(2500, 2500), nn.ReLU(), nn.Linear(2500, 784))


TASKS = {
    "MLP 2-100-100-1": Task(_mlp, (2,), (1,), per_rank=64, steps=20),
    "CNN, 2 layers, 32x32": Task(_cnn, (3, 32, 32), (10,), per_rank=64, steps=5),
    "MLP of 10M parameters": Task(_large, (784,), (784,), per_rank=64, steps=3),
}


class Clock:
    """Makes a rank wait for its turns, and reports how long each turn took."""

    def __init__(self, arguments: Arguments, rank: int) -> None:
        connection = socket.create_connection(("127.0.0.1", arguments["port"]))
        self._lines = connection.makefile("rw")
        self._tell({"contender": arguments["contender"], "rank": rank})
        self._turns = arguments["turns"]
        self._start = 0.0

    def start(self, task: Task) -> None:
        """Begin the turns of ``task``."""
        self._task = task
        self._num_turns = self._num_steps = 0

    def is_over(self) -> bool:
        """Return whether the task's turns are over; wait between turns. Call this at the start of each step."""
        if self._num_turns and self._num_steps < self._task.steps:
            self._num_steps += 1
            return False
        if self._num_turns:
            self._tell(time.perf_counter() - self._start)
        if self._num_turns == self._turns:
            return True
        assert self._lines.readline(), "the benchmark has ended"
        self._num_turns, self._num_steps = self._num_turns + 1, 1
        self._start = time.perf_counter()
        return False

    def _tell(self, what: object) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()


def plain(arguments: Arguments) -> None:
    """Train all tasks with an ordinary loop for one process, which lagom runs on ranks."""
    clock = Clock(arguments, lagom.rank())
    torch.set_num_threads(1)
    for task in map(TASKS.__getitem__, arguments["tasks"]):
        model = task.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch_size = task.per_rank * (1 if arguments["contender"] in ("per_rank", "gloo") else arguments["world_size"])
        loader = DataLoader(_data(task, arguments), batch_size=batch_size, shuffle=True)
        _train(clock, task, loader, model, optimizer, lambda loss: loss.backward())


def ddp(arguments: Arguments) -> None:
    """Train all tasks with the same loop, distributed by hand with DDP."""
    torch.distributed.init_process_group("gloo")
    clock = Clock(arguments, torch.distributed.get_rank())
    torch.set_num_threads(1)
    for task in map(TASKS.__getitem__, arguments["tasks"]):
        torch.manual_seed(0)
        data = _data(task, arguments)
        model = nn.parallel.DistributedDataParallel(task.module())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(data, batch_size=task.per_rank, sampler=DistributedSampler(data))
        _train(clock, task, loader, model, optimizer, lambda loss: loss.backward())
    torch.distributed.destroy_process_group()


def accelerate(arguments: Arguments) -> None:
    """Train all tasks with the same loop, adapted to Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    clock = Clock(arguments, accelerator.process_index)
    torch.set_num_threads(1)
    for task in map(TASKS.__getitem__, arguments["tasks"]):
        torch.manual_seed(0)
        model = task.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(_data(task, arguments), batch_size=task.per_rank, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        _train(clock, task, loader, model, optimizer, accelerator.backward)
    accelerator.end_training()


def _train(
    clock: Clock,
    task: Task,
    loader: Any,
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], object],
) -> None:
    clock.start(task)
    while True:
        for x, y in loader:
            if clock.is_over():
                return
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            backward(loss)
            optimizer.step()


def _data(task: Task, arguments: Arguments) -> TensorDataset:
    """Return random data for about 20 turns."""
    count = task.per_rank * arguments["world_size"] * task.steps * 20
    return TensorDataset(torch.randn(count, *task.input), torch.randn(count, *task.output))


def main(contender: str, arguments: Arguments) -> None:
    """Run one of torchrun's ranks for contender "ddp", or launch the ranks of any other contender."""
    arguments = {**arguments, "contender": contender}
    if contender == "ddp":
        ddp(arguments)
    elif contender == "accelerate":
        from accelerate import notebook_launcher

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        notebook_launcher(accelerate, (arguments,), num_processes=arguments["world_size"], use_port=port)
    else:
        logging.getLogger("lagom").setLevel(logging.ERROR)
        batches: Any = "per_rank" if contender == "gloo" else contender
        config = TorchDistributedConfig(
            hparams={"arguments": arguments},
            world_size=arguments["world_size"],
            launcher="local",
            seed=0,
            batches=batches,
            collectives="gloo" if contender == "gloo" else "auto",
        )
        experiment.lagom(plain, config)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], json.loads(sys.argv[2]))
