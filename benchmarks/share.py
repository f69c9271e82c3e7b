"""Measures which share of one process's work each rank has: ``python -m benchmarks.share [NAME ...]``.

The share is the CPU time of a rank for a step, divided by that of the plain process: 0.5 on two ranks is ideal, 1 gains
nothing. Each number is the median of several runs, over the last 60% of their steps; beside it are the first 16 steps
in total, which include lagom's examinations.

A process that runs alone has caches and memory to itself, and needs less CPU time than the same process beside others.
With ``--beside``, the plain process runs beside copies of itself, one for each rank, so that only the work differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.share_ddp import WITHOUT_DDP
from benchmarks.share_step import ALL_PROGRAMS

FIRST = 16


class Cost(NamedTuple):
    """CPU seconds of a process."""

    step: float
    """Of a step, the median of the last 60%."""
    first: float
    """Of the first steps."""


def measure(name: str, kind: str, num_ranks: int, steps: int) -> Cost:
    """Run a program "plain", by "lagom" or by "DDP"; return the cost of rank 0.

    Plain processes are copies side by side, as many as ``num_ranks``; the cost is that of the first.
    """
    module = ["-m", "benchmarks.share_ddp" if kind == "DDP" else "benchmarks.share_step", name, str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if kind == "lagom":
        commands = [[str(Path(sys.executable).with_name("lagom")), "run", "-n", str(num_ranks), *module]]
    else:
        commands = [[sys.executable, *module]]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "DDP":
            places = [[str(rank), str(num_ranks), f"{folder}/meeting"] for rank in range(num_ranks)]
            commands = [[*commands[0], *place] for place in places]
        elif kind == "plain":
            commands *= num_ranks
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{commands[0]} failed")
    seconds = json.loads(outputs[0].splitlines()[-1])
    return Cost(statistics.median(seconds[int(0.4 * steps) :]), sum(seconds[:FIRST]))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table in Markdown, a line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *ALL_PROGRAMS], default=[])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--times", type=int, default=3, help="runs of each kind, in turns")
    parser.add_argument("--ddp", action="store_true", help="measure DDP by hand, too")
    parser.add_argument("--beside", action="store_true", help="run the plain process beside copies of itself")
    args = parser.parse_args(argv)
    bases = {num: num if args.beside else 1 for num in args.ranks}
    kinds = [(kind, num) for num in args.ranks for kind in (("lagom", "DDP") if args.ddp else ("lagom",))]
    titles = [
        title for kind, num in kinds for title in (f"{kind} on {num}", f"first {FIRST} steps")[: 1 + (kind == "lagom")]
    ]
    print(f"| program | ms a step | {' | '.join(titles)} |\n|{'---|' * (2 + len(titles))}", flush=True)
    shares: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for name in args.names or ALL_PROGRAMS:
        costs: dict[tuple[str, int], list[Cost]] = {}
        for _ in range(args.times):
            for kind in [*(("plain", num) for num in sorted(set(bases.values()))), *kinds]:
                if kind[0] != "DDP" or name not in WITHOUT_DDP:
                    costs.setdefault(kind, []).append(measure(name, *kind, args.steps))
        cells = [f"{1000 * statistics.median(cost.step for cost in costs['plain', bases[args.ranks[0]]]):.0f}"]
        for kind in kinds:
            plain = costs["plain", bases[kind[1]]]
            found = [cost.step / base.step for cost, base in zip(costs.get(kind, []), plain, strict=False)]
            first = [cost.first / base.first for cost, base in zip(costs.get(kind, []), plain, strict=False)]
            if found:
                shares[kind].append(statistics.median(found))
            cells.append(f"{shares[kind][-1]:.2f} ({min(found):.2f} to {max(found):.2f})" if found else "")
            cells += [f"{statistics.median(first):.2f}"] if kind[0] == "lagom" else []
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for (way, num), found in shares.items():
        print(f"\n{way} on {num}: median {statistics.median(found):.2f}, largest {max(found):.2f}")


if __name__ == "__main__":
    main()
