"""Measures which share of one process's work each rank has: ``python -m benchmarks.share [NAME ...] [--ranks 2 4]``.

The share is the CPU time of a rank for a step, divided by that of the plain process: 0.5 on two ranks is ideal, 1 gains
nothing. It hardly depends on other load of the machine. Each number is the median of several runs, over the last 60% of
their steps; beside it are the first 16 steps in total, which include lagom's examinations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.share_programs import PROGRAMS

FIRST = 16


class Cost(NamedTuple):
    """CPU seconds of a process."""

    step: float
    """Of a step, the median of the last 60%."""
    first: float
    """Of the first steps."""


def measure(name: str, num_ranks: int | None, steps: int) -> Cost:
    """Run a program plainly, or on ranks; return the cost of the process, or of rank 0."""
    lagom = [str(Path(sys.executable).with_name("lagom")), "run", "-n", str(num_ranks), "-m"]
    command = lagom if num_ranks else [sys.executable, "-m"]
    done = subprocess.run(
        [*command, "benchmarks.share_programs", name, str(steps)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = json.loads(done.stdout.splitlines()[-1])
    return Cost(statistics.median(seconds[int(0.4 * steps) :]), sum(seconds[:FIRST]))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table in Markdown, a line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], default=[])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--times", type=int, default=3, help="runs of each kind, in turns")
    args = parser.parse_args(argv)
    kinds = [None, *args.ranks]
    titles = [f"share on {num} | first {FIRST} steps on {num}" for num in args.ranks]
    print(f"| program | ms a step | {' | '.join(titles)} |\n|{'---|' * (2 + 2 * len(args.ranks))}", flush=True)
    shares: dict[int, list[float]] = {num: [] for num in args.ranks}
    for name in args.names or PROGRAMS:
        runs = [[measure(name, num, args.steps) for num in kinds] for _ in range(args.times)]
        cells = [f"{1000 * statistics.median(plain.step for plain, *_ in runs):.0f}"]
        for place, num in enumerate(args.ranks, 1):
            found = [one[place].step / one[0].step for one in runs]
            first = [one[place].first / one[0].first for one in runs]
            shares[num].append(statistics.median(found))
            cells += [
                f"{shares[num][-1]:.2f} ({min(found):.2f} to {max(found):.2f})",
                f"{statistics.median(first):.2f}",
            ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for num, found in shares.items():
        print(f"\nMedian on {num} ranks: {statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
