"""Measures what a rank of this machine takes, from 2 ranks to 64: launch, memory, files, sockets, threads, a step.

    python -m benchmarks.local_ranks [--ranks 2 4 8 16 32 64] [--svg docs/local_ranks.svg]

The program is a tiny network, and every rank exchanges its gradient in each step. Ranks share the cores of this
machine: on two of them, 64 ranks take turns.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.watch.chart import line_chart

STEPS = 200
LIMITS = {"private memory, MB": 60.0, "files": 40.0, "sockets": 10.0}
"""The most that a rank may take, with any number of ranks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each number of ranks; return 0 if every limit holds, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    args = parser.parse_args(argv)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    measure(2)  # starts the fork server, whose start must not count in the first launch
    print("ranks  call to first line, s  private memory, MB  files  sockets  threads  a step, ms  (worst rank)")
    found = {}
    for ranks in args.ranks:
        one = found[ranks] = measure(ranks)
        print(
            f"{ranks:5} {one['launch, s']:22.2f} {one['private memory, MB']:19.1f} {one['files']:6.0f} "
            f"{one['sockets']:8.0f} {one['threads']:8.0f} {one['step, ms']:11.2f}",
            flush=True,
        )
    if args.svg is not None:
        names = ("private memory, MB", "files", "sockets", "threads")
        lines = {name: [(float(ranks), one[name]) for ranks, one in found.items()] for name in names}
        args.svg.write_text(_chart(lines) + "\n")
    missed = [
        f"MISSED {name}: {one[name]:.0f} with {ranks} ranks, and {limit:g} are wanted"
        for name, limit in LIMITS.items()
        for ranks, one in found.items()
        if one[name] > limit
    ]
    print("\n".join(missed) or "holds: " + ", ".join(f"{name} at most {limit:g}" for name, limit in LIMITS.items()))
    return 1 if missed else 0


def _chart(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a chart over the number of ranks, on white: changes the unit of ``line_chart``, which is seconds."""
    svg = line_chart("What a rank takes, by the number of ranks", lines, from_zero=True)
    return svg.replace(" s</text>", " ranks</text>").replace("><", '><rect width="500" height="230" fill="white"/><', 1)


def measure(world_size: int) -> dict[str, float]:
    """Return the largest value of each figure over the ranks."""
    config = TorchDistributedConfig(world_size=world_size, launcher="local", batches="per_rank", run_dir=None)
    start = time.time()
    ranks = experiment.lagom(steps, config).per_rank
    found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return found | {"launch, s": found.pop("began") - start}


def steps() -> dict[str, Any]:
    """Train for some steps; return the figures of this rank, such as its memory and sockets."""
    began = time.time()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.rand(64 * STEPS * 4, 8), torch.rand(64 * STEPS * 4, 1))
    times = [time.perf_counter()]
    while len(times) <= STEPS:
        for x, y in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter())
            if len(times) > STEPS:
                break
    with open("/proc/self/smaps_rollup") as rollup:
        private_kb = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    files = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    kinds = [os.readlink(path) for path in files if os.path.islink(path)]
    return {
        "began": began,
        "private memory, MB": private_kb / 1024,
        "files": len(kinds),
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
        "threads": len(os.listdir("/proc/self/task")),
        "step, ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times)),
    }


if __name__ == "__main__":
    sys.exit(main())
