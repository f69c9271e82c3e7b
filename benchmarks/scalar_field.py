"""Measures the time per epoch of examples/scalar_field.py: in one process, with lagom and with DDP on 2 ranks.

    python -m benchmarks.scalar_field [--starts 5] [--epochs 20]

An epoch includes the example's evaluation. Every process has one thread. "per_rank" has 64 samples per rank and step,
and so half as many steps; "split" and "whole" have the global batch of one process. DDP is written by hand, with
torchrun, gloo, a DistributedSampler and an evaluation on every rank. Each contender runs in new processes, several
times, in alternating order; ratios compare contenders of one start. Run it on a machine with two free cores: if two
plain programs side by side take longer than one alone, two ranks cannot be twice as fast as one process.
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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.scalar_field import Approximator, scalar_field, train
from lagom import experiment
from lagom.config import TorchDistributedConfig

WORLD_SIZE = 2
BATCH_SIZE = 64
POINTS = 10_000
CONTENDERS = {
    "plain": "one process, one thread",
    "pair": "two of these side by side",
    "whole": "lagom, whole (the default)",
    "per_rank": "lagom, per_rank",
    "per_rank gloo": "lagom, per_rank, over gloo",
    "per_rank ddp": "DDP by hand, gloo, 64 per rank",
    "split": "lagom, split",
    "split gloo": "lagom, split, over gloo",
    "split ddp": "DDP by hand, gloo, 32 per rank",
}
TARGETS = {"per_rank": 2.0, "split": 1.3}
"""Least speed, as a multiple of the speed of one process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print milliseconds and ratios with quartiles; return 0 if the targets hold, else 1."""
    args = _arguments(argv)
    if args.contender is not None:
        if (seconds := contender(args.contender, args.epochs)) is not None:
            print(json.dumps(seconds))
        return 0
    starts: list[dict[str, float]] = []
    for number in range(args.starts):
        names = list(CONTENDERS) if number % 2 else list(reversed(CONTENDERS))
        starts.append({name: _started(name, args.epochs) for name in names})
        print(f"start {number + 1} of {args.starts}: done", file=sys.stderr)
    print(f"{'ms per epoch, median of starts and quartiles':36}          times as fast as one process")
    ratios = {name: [start["plain"] / start[name] for start in starts] for name in CONTENDERS}
    for name, title in CONTENDERS.items():
        low, median, high = _quartiles([1e3 * start[name] for start in starts])
        less, ratio, more = _quartiles(ratios[name])
        print(f"{title:36} {median:7.1f} {low:7.1f} {high:7.1f}   {ratio:5.2f}x  {less:.2f} {more:.2f}")
    held = {name: statistics.median(ratios[name]) >= target for name, target in TARGETS.items()}
    for name, target in TARGETS.items():
        print(f"{'holds' if held[name] else 'MISSED':7}{CONTENDERS[name]} is at least {target} times as fast")
    return 0 if all(held.values()) else 1


def contender(name: str, epochs: int) -> float | None:
    """Run contender ``name`` in this process.

    Returns:
        Seconds per epoch of its slowest rank; None in the second process of DDP.
    """
    torch.set_num_threads(1)
    batches: Any
    batches, _, how = name.partition(" ")
    if name == "plain":
        return timed(Approximator, {"epochs": epochs}, *scalar_field(POINTS))
    if name == "pair":
        with ThreadPoolExecutor(WORLD_SIZE) as side_by_side:
            return max(side_by_side.map(lambda _: _started("plain", epochs), range(WORLD_SIZE)))
    if how == "ddp":
        return ddp(epochs, BATCH_SIZE if batches == "per_rank" else BATCH_SIZE // WORLD_SIZE)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    train_set, test_set = scalar_field(POINTS)
    config = TorchDistributedConfig(
        module=Approximator,
        hparams={"epochs": epochs},
        train_set=train_set,
        test_set=test_set,
        world_size=WORLD_SIZE,
        launcher="local",
        seed=0,
        batches=batches,
        collectives="gloo" if how else "auto",
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return float(max(experiment.lagom(timed, config).per_rank))


def timed(module: Any, hparams: Mapping[str, Any], train_set: TensorDataset, test_set: TensorDataset) -> float:
    """Run the example's single-process training function, and return its seconds per epoch after two warm-up epochs."""
    torch.set_num_threads(1)
    hparams = {"batch_size": BATCH_SIZE, "lr": 1e-3, **hparams}
    with contextlib.redirect_stdout(io.StringIO()):
        train(module, {**hparams, "epochs": 2}, train_set, test_set)
        start = time.perf_counter()
        train(module, hparams, train_set, test_set)
    return (time.perf_counter() - start) / float(hparams["epochs"])


def ddp(epochs: int, batch_size: int) -> float | None:
    """Train with DDP by hand; return seconds per epoch on rank 0, None on others. Ranks wait for each other."""
    torch.distributed.init_process_group("gloo")
    train_set, test_set = scalar_field(POINTS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Approximator())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=BATCH_SIZE)
    start = 0.0
    for epoch in range(epochs + 2):
        if epoch == 2:
            start = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for points, values in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(points), values).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            sum(((model.module(points) - values) ** 2).sum().item() for points, values in test_loader)
    seconds = (time.perf_counter() - start) / epochs
    first = torch.distributed.get_rank() == 0
    torch.distributed.destroy_process_group()
    return seconds if first else None


def _started(name: str, epochs: int) -> float:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
    start = torchrun if name.endswith("ddp") else []
    command = [sys.executable, *start, "-m", "benchmarks.scalar_field", "--epochs", str(epochs), "--contender", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{CONTENDERS[name]} failed: {done.stdout[-500:]}{done.stderr[-2000:]}")
    return float(json.loads(done.stdout))


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time per epoch of the scalar-field example, on 1 process and 2 ranks."
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
