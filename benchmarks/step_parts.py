"""Measures the parts of a small training step, from loading to the optimizer's step, in one process and on 2 ranks.

    python -m benchmarks.step_parts [--epochs 12] [--starts 3]

The program is the loop of examples/scalar_field.py with a clock between its lines. Each figure is in microseconds: the
median over a rank's steps after the first quarter, then over ranks and starts. "over plain" is the additional time of
zero_grad, forward, loss, backward and step, compared with one process on as many samples. "evaluate" is the time of one
evaluation batch of 64, with its loading; every rank gets whole evaluation batches. Every process has one thread. Run it
on a machine with two free cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.scalar_field import Approximator, scalar_field
from lagom import experiment
from lagom.config import TorchDistributedConfig

WORLD_SIZE = 2
BATCH_SIZE = 64
POINTS = 10_000
PARTS = ("next", "zero_grad", "forward", "loss", "backward", "step", "all", "evaluate")
CONTENDERS = {
    "plain 64": "one process, 64 samples",
    "per_rank 64": "lagom, per_rank, 64 on each rank",
    "plain 32": "one process, 32 samples",
    "split 64": "lagom, split, 32 on each rank",
}
PEERS = {"per_rank 64": "plain 64", "split 64": "plain 32"}
"""Peer of each lagom contender: the single process with as many samples per step as one of its ranks."""
TARGET_US = 70.0
"""Limit of the additional time of a step, in microseconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; return 0 if the target holds, else 1."""
    args = _arguments(argv)
    if args.contender is not None:
        print(json.dumps(contender(args.contender, args.epochs)))
        return 0
    starts = [{name: _started(name, args.epochs) for name in CONTENDERS} for _ in range(args.starts)]
    print(f"{'microseconds':34}" + "".join(f"{part:>11}" for part in PARTS) + "  over plain")
    over = {name: [_over(start, name) for start in starts] for name in PEERS}
    for name, title in CONTENDERS.items():
        parts = [statistics.median(start[name][i] for start in starts) for i in range(len(PARTS))]
        more = f"{statistics.median(over[name]):12.1f}" if name in over else ""
        print(f"{title:34}" + "".join(f"{part:11.1f}" for part in parts) + more)
    held = statistics.median(over["per_rank 64"]) <= TARGET_US
    print(
        f"{'holds' if held else 'MISSED':7}a step takes at most {TARGET_US:g} us more than a plain one, without loading"
    )
    return 0 if held else 1


def contender(name: str, epochs: int) -> list[float]:
    """Run contender ``name`` in this process; return the median of each of ``PARTS`` over its ranks."""
    torch.set_num_threads(1)
    kind, size = name.split()
    hparams = {"epochs": epochs, "batch_size": int(size)}
    train_set, test_set = scalar_field(POINTS)
    if kind == "plain":
        return timed(Approximator, hparams, train_set, test_set)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    config = TorchDistributedConfig(
        module=Approximator,
        hparams=hparams,
        train_set=train_set,
        test_set=test_set,
        world_size=WORLD_SIZE,
        launcher="local",
        seed=0,
        batches="per_rank" if kind == "per_rank" else "split",
    )
    with contextlib.redirect_stdout(io.StringIO()):
        ranks = experiment.lagom(timed, config).per_rank
    return [statistics.median(parts) for parts in zip(*ranks, strict=True)]


def timed(module: Any, hparams: Mapping[str, Any], train_set: TensorDataset, test_set: TensorDataset) -> list[float]:
    """Run a single-process training loop with clocks; return the median microseconds of each of ``PARTS``."""
    torch.set_num_threads(1)
    model = module()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = torch.nn.MSELoss()
    loader = DataLoader(train_set, batch_size=hparams["batch_size"], shuffle=True)
    rows = []
    evaluations = []
    for _ in range(hparams["epochs"]):
        model.train()
        batches = iter(loader)
        while True:
            at = [perf_counter_ns()]
            try:
                points, values = next(batches)
            except StopIteration:
                break
            at.append(perf_counter_ns())
            optimizer.zero_grad()
            at.append(perf_counter_ns())
            found = model(points)
            at.append(perf_counter_ns())
            loss = criterion(found, values)
            at.append(perf_counter_ns())
            loss.backward()
            at.append(perf_counter_ns())
            optimizer.step()
            at.append(perf_counter_ns())
            rows.append([*(end - start for start, end in pairwise(at)), at[-1] - at[0]])
        model.eval()
        with torch.no_grad():
            batches = iter(DataLoader(test_set, batch_size=BATCH_SIZE))
            start = perf_counter_ns()
            squares = [((model(points) - values) ** 2).sum().item() for points, values in batches]
            evaluations.append((perf_counter_ns() - start) / len(squares))
    parts = [statistics.median(part) / 1e3 for part in zip(*rows[len(rows) // 4 :], strict=True)]
    return [*parts, statistics.median(evaluations[len(evaluations) // 4 :]) / 1e3]


def _over(start: Mapping[str, Sequence[float]], name: str) -> float:
    own, plain = start[name], start[PEERS[name]]
    return sum(own[i] - plain[i] for i, part in enumerate(PARTS) if part not in ("next", "all", "evaluate"))


def _started(name: str, epochs: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.step_parts", "--epochs", str(epochs), "--contender", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{CONTENDERS[name]} failed: {done.stdout[-500:]}{done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout)
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Where the time of a small step goes, on 1 process and 2 ranks.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
