"""Measures the cost of snapshots in a training: time of the steps after each fork, and of ``next(loader)``.

    python -m benchmarks.survive_steps [--only "100 MB of state"] [--seconds 120]

The times of whole runs with and without protection differ by chance by more than 1%, the cost that must be noticed. So
one run is compared with itself: the cost of a fork is the time of the steps in a window after its beginning, less the
time of as many steps before it. The window has three steps, and the time to write a snapshot. The same
difference is computed at moments in the middle between two forks, where it should be 0; this is the error. For the
smallest step, another line has medians of the time of ``next(loader)`` with and without protection, in turns.

On 2 ranks of this machine; steps and states are those of ``benchmarks.survive``.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.survive import PROTECTION, SIZES, WORLD_SIZE
from lagom import experiment
from lagom.config import TorchDistributedConfig

WINDOWS_S = dict(zip(SIZES, (0.5, 2.0, 15.0), strict=True))
_ROUNDS, _ROUND_S = 5, 4.0
_FIRST_STEPS = 30
LEAST_STEPS = 3
"""Least number of steps in the window before a fork; the steps after the fork are compared with their mean."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line or two for each size."""
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name in SIZES if args.only is None else (args.only,):
            width = SIZES[name][0]
            step_s = run(width, _FIRST_STEPS, Path(folder), {})["step_s"]
            found = run(width, int(args.seconds / step_s), Path(folder), PROTECTION)
            window_s = max(WINDOWS_S[name], 3 * found["step_s"])
            print(f"{name:18} {cost(found, window_s)}", flush=True)
            if name == next(iter(SIZES)):
                print(f"{name:18} {of_next(width, int(_ROUND_S / step_s), Path(folder), PROTECTION)}", flush=True)
    return 0


def run(width: int, num: int, folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run ``steps`` by lagom, and return rank 0's result."""
    hparams = {"width": width, "num": num}
    config = TorchDistributedConfig(
        world_size=WORLD_SIZE, launcher="local", run_dir=folder, hparams=hparams, **settings
    )
    found: Mapping[str, Any] = experiment.lagom(steps, config).per_rank[0]
    return found


class SameBatch(Dataset[torch.Tensor]):
    """A data set in which every item is the same batch, so that a long pass needs little memory."""

    def __init__(self, width: int, num: int) -> None:
        self.rows, self.num = torch.ones(8, width), num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows


def steps(width: int, num: int) -> Mapping[str, Any]:
    """Train a layer with Adam for ``num`` steps.

    Returns:
        Times at which steps ended and forks began; median seconds of ``next`` and of a step.
    """
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    forks: list[float] = []
    os.register_at_fork(before=lambda: forks.append(time.perf_counter()))
    ends, waited = [time.perf_counter()], []
    for rows in DataLoader(SameBatch(width, num), batch_size=None):
        waited.append(time.perf_counter() - ends[-1])
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        ends.append(time.perf_counter())
    step_s = statistics.median(after - before for before, after in itertools.pairwise(ends))
    return {"ends": ends, "forks": forks, "next_s": statistics.median(waited), "step_s": step_s}


def cost(found: Mapping[str, Any], window_s: float) -> str:
    """Return as text the cost of the forks, and the error: the same difference at moments without a fork."""
    ends, forks = found["ends"], found["forks"]
    between = [(before + after) / 2 for before, after in itertools.pairwise(forks)]
    costs, errors = (
        [excess for at in moments if (excess := excess_s(ends, at, window_s)) is not None]
        for moments in (forks, between)
    )
    if not costs:
        return f"{len(forks)} forks, of which none can be seen"
    took_s = ends[-1] - ends[0]
    share = statistics.mean(costs) * len(forks) / took_s
    return (
        f"{len(forks)} forks in {took_s:.0f} s, steps of {found['step_s'] * 1e3:.2f} ms; each {_shown(costs)}, "
        f"{share:.2%} of the time; between them {_shown(errors)}"
    )


def excess_s(ends: Sequence[float], at: float, window_s: float) -> float | None:
    """Return the time of the steps in the window after ``at``, less that of as many steps of mean length before ``at``.

    Returns:
        Seconds; None if there are too few steps before ``at``, or the run ends within the window.
    """
    first = bisect.bisect_right(ends, at)  # ends[first] is the end of the step during which ``at`` was
    begin, end = bisect.bisect_left(ends, at - window_s), bisect.bisect_right(ends, at + window_s)
    if end >= len(ends) or first - 1 - begin < LEAST_STEPS:
        return None
    usual = (ends[first - 1] - ends[begin]) / (first - 1 - begin)
    return ends[end] - ends[first - 1] - (end - first + 1) * usual


def of_next(width: int, num: int, folder: Path, settings: Mapping[str, Any]) -> str:
    """Return as text the time of the loader's ``next`` with and without protection."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(_ROUNDS):
        for protects in (True, False) if number % 2 else (False, True):
            found[protects].append(run(width, num, folder, settings if protects else {})["next_s"] * 1e6)
    with_, without = (f"{statistics.median(one):.1f} us ({min(one):.1f}-{max(one):.1f})" for one in found.values())
    return f"next(loader) takes {with_}, and without protection {without}"


def _shown(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return ", ".join(f"{one * 1e3:.0f} ms" for one in seconds) or "unknown"
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f}, mean {statistics.mean(seconds) * 1e3:.0f})"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of protection, by the steps after each fork.")
    parser.add_argument("--only", choices=SIZES, help="measure only this state")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
