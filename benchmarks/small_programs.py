"""Measures whether small programs become slower on two ranks: ``python -m benchmarks.small_programs [NAME ...]``.

A second rank cannot help a program whose steps take less than an exchange, or whose rows depend on each other; it
should cost no more than the second core that it keeps busy. So one rank is measured beside another run of one rank, as
an equal load, and two ranks in turns with it. Each number is the median of several runs, of the epochs after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Seconds(NamedTuple):
    """Seconds of an epoch of one process."""

    wall: float
    cpu: float


def table(normalizes: bool = True) -> tuple[nn.Module, TensorDataset, int, Callable[..., Tensor]]:
    """Make the model, the data, the size of a batch and the loss of a table of 20,000 rows."""
    extra = [[nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1)] if normalizes else [nn.ReLU()] for _ in range(2)]
    model = nn.Sequential(nn.Linear(64, 256), *extra[0], nn.Linear(256, 256), *extra[1], nn.Linear(256, 2))
    data = TensorDataset(torch.randn(20_000, 64), torch.randint(2, (20_000,)))
    return model, data, 256, lambda model, x, y: F.cross_entropy(model(x), y)


def plain_table() -> tuple[nn.Module, TensorDataset, int, Callable[..., Tensor]]:
    """Make the table's program without BatchNorm and dropout."""
    return table(normalizes=False)


def field() -> tuple[nn.Module, TensorDataset, int, Callable[..., Tensor]]:
    """Make a small network of coordinates, as in the article that lagom comes from."""
    widths = [2, 20, 20, 20, 1]
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.Tanh())][:-1]
    data = TensorDataset(torch.rand(4096, 2), torch.rand(4096, 1))
    return nn.Sequential(*layers), data, 64, lambda model, x, y: F.mse_loss(model(x), y)


def contrast() -> tuple[nn.Module, TensorDataset, int, Callable[..., Tensor]]:
    """Make a model that mixes the rows of a batch, and so runs whole."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            return (y @ y.T).softmax(1) @ y

    data = TensorDataset(torch.randn(8192, 64), torch.randn(8192, 64))
    return Mixing(), data, 128, lambda model, x, y: F.mse_loss(model(x), y)


def adaptation() -> tuple[nn.Module, TensorDataset, int, Callable[..., Tensor]]:
    """Make meta-learning of second order (MAML) by gradients of functional calls."""
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for inputs, targets in zip(x, y, strict=True):
            weights: dict[str, Tensor] = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, weights, inputs[:10]), targets[:10])
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            adapted = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            total = total + F.mse_loss(functional_call(model, adapted, inputs[10:]), targets[10:])
        return total / len(x)

    x = torch.rand(512, 20, 1)
    return model, TensorDataset(x, x.sin()), 16, loss


PROGRAMS = {program.__name__: program for program in (table, plain_table, field, contrast, adaptation)}


def train(name: str, epochs: int) -> list[Seconds]:
    """Train the program ``name``; return the seconds of each epoch."""
    torch.manual_seed(0)
    model, data, batch_size, loss_of = PROGRAMS[name]()
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    seconds = []
    for _ in range(epochs):
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()
        seconds.append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
    return seconds


def measure(name: str, launches: Sequence[Sequence[str]], epochs: int) -> Seconds:
    """Run the program by each of ``launches`` at the same time; return the seconds of an epoch, the larger of them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = ["-m", "benchmarks.small_programs", "--train", name, "--epochs", str(epochs)]
    processes = [
        subprocess.Popen([*launch, *command], env=environment, stdout=subprocess.PIPE, text=True) for launch in launches
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{launches[0]} of {name} failed")
    epochs_of = [[Seconds(*epoch) for epoch in json.loads(output.splitlines()[-1])[1:]] for output in outputs]
    return Seconds(
        max(statistics.median(epoch.wall for epoch in each) for each in epochs_of),
        max(statistics.median(epoch.cpu for epoch in each) for each in epochs_of),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table in Markdown, a line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], default=[])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--times", type=int, default=3, help="runs of each kind, in turns")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.train:
        print(json.dumps(train(args.train, args.epochs)))
        return
    lagom = [str(Path(sys.executable).with_name("lagom")), "run", "-n"]
    kinds = {
        "two plain processes": [[sys.executable]] * 2,
        "two runs of 1 rank": [[*lagom, "1"]] * 2,
        "2 ranks": [[*lagom, "2"]],
    }
    print(f"| program | {' | '.join(f'{kind}, ms an epoch (CPU)' for kind in kinds)} | 2 ranks by 1 rank (CPU) |")
    print(f"|{'---|' * (2 + len(kinds))}", flush=True)
    for name in args.names or PROGRAMS:
        runs: dict[str, list[Seconds]] = {kind: [] for kind in kinds}
        for _ in range(args.times):
            for kind, launches in kinds.items():
                runs[kind].append(measure(name, launches, args.epochs))
        cells = [f"{_median(found, 'wall'):.0f} ({_median(found, 'cpu'):.0f})" for found in runs.values()]
        two, one = runs["2 ranks"], runs["two runs of 1 rank"]
        ratios = [_median(two, clock) / _median(one, clock) for clock in ("wall", "cpu")]
        print(f"| {name} | {' | '.join(cells)} | {ratios[0]:.2f} ({ratios[1]:.2f}) |", flush=True)


def _median(runs: Sequence[Seconds], clock: str) -> float:
    """Return the median of a clock over runs, in milliseconds."""
    return 1000 * float(statistics.median(getattr(seconds, clock) for seconds in runs))


if __name__ == "__main__":
    main()
