"""What it costs to see a run: progress, heartbeats, watchdog, the output of all ranks and a timeline, on against off.

    python -m benchmarks.observe [--turns 60] [--starts 7]

All run the same loop on 2 ranks with a thread each, at once, and take short turns, so that what else the machine does
slows all alike. A turn's time is that of its slowest rank. What is judged is the 10th percentile of turns, which other
processes have least to do with; of several starts the median. "on" is how a long run goes, whose timeline keeps
samples; "kept" has it keep every step, as it does with the first 100.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lagom
from benchmarks.step import Contender
from benchmarks.step_programs import Clock
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.monitor import spans

Times = dict[str, list[float]]
"""Seconds per step, turn by turn, by contender."""
WORLD_SIZE = 2
WARM_UP = 4
CONTENDERS = ("off", "on", "kept")
_PRINTS = 100
"""Steps for each line that every rank prints."""


@dataclass(frozen=True)
class Task:
    """What is trained."""

    name: str
    width: int
    layers: int
    batch_size: int
    steps: int
    """In a turn."""
    most_us: float
    """That a step may take more; 0: a hundredth of it."""

    def module(self) -> nn.Module:
        """Small layers: how fast large ones are depends on where their memory happens to lie."""
        inner = [part for _ in range(self.layers) for part in (nn.Linear(self.width, self.width), nn.Tanh())]
        return nn.Sequential(nn.Linear(8, self.width), *inner, nn.Linear(self.width, 1))


TASKS = (
    Task("a step of about 0.3 ms", width=16, layers=1, batch_size=16, steps=150, most_us=20),
    Task("a step of about 5 ms", width=32, layers=48, batch_size=448, steps=12, most_us=0),
)


def train(arguments: Mapping[str, Any]) -> None:
    """The loop that is timed."""
    torch.set_num_threads(1)
    clock = Clock(arguments, lagom.rank())
    if arguments["contender"] == "kept":
        _keep_all()
    for task in TASKS:
        torch.manual_seed(0)
        model = task.module()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        count = task.batch_size * task.steps * 4
        loader = DataLoader(TensorDataset(torch.randn(count, 8), torch.randn(count, 1)), batch_size=task.batch_size)
        clock.start(task)  # type: ignore[arg-type]
        _train(clock, loader, model, optimizer)


def _train(clock: Clock, loader: Any, model: nn.Module, optimizer: Any) -> None:
    number = 0
    while True:
        for x, y in loader:
            if clock.is_over():
                return
            number += 1
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if number % _PRINTS == 0:
                print(f"step {number}")


def _keep_all() -> None:
    noted = spans._current
    assert noted is not None
    noted._closes_at, noted._opens_at, noted._ends_at, noted.keeps = -1, -1, 10**9, True


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a step takes more; 0 when the limits hold, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=60, help="that count, of each contender in each start")
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--be", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.be:
        _be(args.be, args.arguments)
        return 0
    starts: dict[str, list[Times]] = {task.name: [] for task in TASKS}
    for _ in range(args.starts):
        with contenders(args.turns) as able:
            for task in TASKS:
                starts[task.name].append(measure(able, task, args.turns))
    held = [report(task, starts[task.name]) for task in TASKS]
    return 0 if all(held) else 1


def measure(able: Mapping[str, Contender], task: Task, turns: int) -> Times:
    """Let the contenders take turns, none of them twice in a row: the second turn would find its caches full."""
    times: Times = {name: [] for name in able}
    for number in range(WARM_UP + turns):
        for name in able:
            seconds = able[name].turn(task.steps)
            if number >= WARM_UP:
                times[name].append(seconds)
    return times


def report(task: Task, starts: Sequence[Times]) -> bool:
    """Print; whether the limits hold."""
    off = statistics.median(_low(times["off"]) for times in starts)
    limit = task.most_us * 1e-6 or 0.01 * off
    print(f"{task.name}: {1e3 * off:.3f} ms with everything off")
    good = True
    for name in CONTENDERS[1:]:
        more = sorted(_low(times[name]) - _low(times["off"]) for times in starts)
        median = statistics.median(more)
        good = good and median <= limit
        verdict = "holds " if median <= limit else "MISSED"
        print(
            f"{verdict} {name:4} {1e6 * median:+7.1f} us a step ({median / off:+.2%}; "
            f"of {len(more)} starts {1e6 * more[0]:+.1f} to {1e6 * more[-1]:+.1f}), limit {1e6 * limit:.0f} us"
        )
    return good


def _low(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


@contextmanager
def contenders(turns: int) -> Iterator[dict[str, Contender]]:
    """Start all."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
        arguments = {"port": listener.getsockname()[1], "turns": WARM_UP + turns, "run_dir": folder}
        started = {}
        for name in CONTENDERS:
            errors = open(os.path.join(folder, f"{name}.err"), "w+")  # noqa: SIM115  (closed with its contender)
            command = [sys.executable, "-m", "benchmarks.observe", "--be", name, "--arguments", json.dumps(arguments)]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, text=True)
            started[name] = Contender(process, errors)
        try:
            _connect(listener, started)
            yield started
            for one in started.values():
                one.process.wait(timeout=60)
        finally:
            for one in started.values():
                one.process.terminate()
                one.process.wait()
                one.errors.close()


def _connect(listener: socket.socket, started: Mapping[str, Contender]) -> None:
    listener.settimeout(1)
    deadline = time.monotonic() + 120
    while any(len(one.ranks) < WORLD_SIZE for one in started.values()):
        for name, one in started.items():
            if one.process.poll() is not None:
                one.errors.seek(0)
                raise RuntimeError(f"{name} ended: {one.errors.read()[-1000:]}")
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        connection.settimeout(120)
        lines = connection.makefile("rw")
        hello = json.loads(lines.readline())
        started[hello["contender"]].ranks[hello["rank"]] = lines


def _be(name: str, arguments: Mapping[str, Any]) -> None:
    """Launch the ranks of a contender."""
    settings: dict[str, Any] = {"hb_interval": 1e6, "stall_timeout_s": math.inf, "run_dir": None}
    if name != "off":
        settings = {"timeline": True, "log": "all", "run_dir": arguments["run_dir"]}
    given = {"arguments": {**arguments, "contender": name}}
    experiment.lagom(train, TorchDistributedConfig(hparams=given, world_size=WORLD_SIZE, launcher="local", **settings))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
