"""Measures how a large in-memory data set reaches 2 ranks: seconds until the first batch, and the memory added.

    python -m benchmarks.payload [--megabytes 1000] [--master local[2]]

Contenders are lagom, and TorchDistributor with the data set as an argument. The memory added is the peak of all
processes together, less the memory before the call, which has the data set once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import memory, peers
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher

WORLD_SIZE = 2
MB = 1_000_000


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one call."""

    seconds: float
    """Seconds from the call to the first batch, on the slowest rank that reports a time."""
    added: int
    """Bytes at the peak, less the bytes before the call."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print time and memory of each contender; return 0 if the targets hold, else 1."""
    args = _arguments(argv)
    data = TensorDataset(torch.ones(args.megabytes * MB // 4000, 1000))
    size = data.tensors[0].nbytes
    with peers.spark(args.master):
        measured = {name: measure(name, call, data) for name, call in _contenders().items()}
    print(report(measured, size))
    return 0 if all(held for _, held in targets(measured, size)) else 1


def measure(name: str, call: Callable[[TensorDataset], Sequence[float]], data: TensorDataset) -> Measurement | None:
    """Measure ``call``, which returns for each rank the time of day at its first batch; return None if it fails."""
    try:
        call(TensorDataset(torch.ones(64, 1000)))  # warm up
        with memory.watched() as added:
            start = time.time()
            firsts = call(data)
    except Exception as error:  # TorchDistributor may fail on a large data set; the table then says so
        print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return None
    return Measurement(max(firsts) - start, added())


def report(measured: Mapping[str, Measurement | None], size: int) -> str:
    """Return a table, and a line for each target that says whether it holds."""
    lines = [f"{f'{size / MB:.0f} MB on {WORLD_SIZE} ranks, warm':30} first batch s   memory added / data"]
    for name, one in measured.items():
        figures = f"{one.seconds:13.2f} {one.added / size:21.2f}" if one else f"{'failed':>13} {'failed':>21}"
        lines.append(f"{name:30} {figures}")
    lines += [f"{'holds' if held else 'MISSED':7}{target}" for target, held in targets(measured, size)]
    return "\n".join(lines)


def targets(measured: Mapping[str, Measurement | None], size: int) -> list[tuple[str, bool]]:
    """Return each target as text, and whether it holds."""
    found = []
    for name in ("lagom, spark", "lagom, local"):
        one = measured[name]
        found += [
            (f"{name}: first batch in less than 3 s", one is not None and one.seconds < 3),
            (f"{name}: less than 1.3 times the data added", one is not None and one.added < 1.3 * size),
        ]
    return found


def first_batch(train_set: TensorDataset) -> tuple[float, float]:
    """Return the time of day at the first batch, and the sum of all data, which loads every page into memory."""
    next(iter(DataLoader(train_set, batch_size=64, shuffle=True)))
    now = time.time()
    total = train_set.tensors[0].sum().item()
    time.sleep(0.5)  # so that the memory watcher takes a sample
    return now, total


def _contenders() -> dict[str, Callable[[TensorDataset], Sequence[float]]]:
    return {
        "lagom, spark": lambda data: _lagom(data, "spark"),
        "lagom, local": lambda data: _lagom(data, "local"),
        "TorchDistributor, local": lambda data: _torch_distributor(data, local_mode=True),
        "TorchDistributor, distributed": lambda data: _torch_distributor(data, local_mode=False),
    }


def _lagom(data: TensorDataset, launcher: Launcher) -> list[float]:
    config = TorchDistributedConfig(train_set=data, world_size=WORLD_SIZE, launcher=launcher)
    return [now for now, _ in experiment.lagom(first_batch, config).per_rank]


def _torch_distributor(data: TensorDataset, local_mode: bool) -> list[float]:
    # TorchDistributor returns the result of one rank only.
    now, _ = peers.torch_distributor(first_batch, data, world_size=WORLD_SIZE, local_mode=local_mode)
    return [now]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A large data set on 2 ranks, against TorchDistributor.")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--master", default=f"local[{WORLD_SIZE}]", help="also local-cluster[2,1,1024], spark://...")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
