"""Compare the estimated step of one process in ``result.speed`` with the measured one.

``python -m benchmarks.speed_estimate`` trains programs of ``benchmarks.share`` plainly and on ranks, in turns, each
process with one thread. All seconds are CPU seconds. A process is slower while others compute beside it, as ranks do,
so plain processes are measured alone and as many at a time as there are ranks.
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

from benchmarks.share_programs import PROGRAMS
from lagom.speed import Speed

FIRST = 16
"""Steps that ``Speed`` leaves out."""


def _process(command: Sequence[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(err)
    return out


def plain_step(name: str, steps: int, num_processes: int = 1) -> float:
    """Return the mean seconds of a step of a plain process, while as many others as given run beside it."""
    command = [sys.executable, "-m", "benchmarks.share_step", name, str(steps)]
    outputs = [_output(one) for one in [_process(command) for _ in range(num_processes)]]
    found: list[list[float]] = [json.loads(out.splitlines()[-1])[FIRST:] for out in outputs]
    return statistics.mean(statistics.mean(seconds) for seconds in found)


def speed_on(num_ranks: int, name: str, steps: int) -> Speed:
    """Return the speed of a run on ranks of this machine."""
    with tempfile.TemporaryDirectory() as runs:
        lagom = str(Path(sys.executable).with_name("lagom"))
        command = [lagom, "run", "-n", str(num_ranks), "-m", "benchmarks.share_step", name, str(steps), "speed"]
        _output(_process(command, LAGOM_RUN_DIR=runs))
        (folder,) = Path(runs).glob("*/run.json")
        return Speed.from_json(json.loads(folder.read_text())["speed"])


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table in Markdown, a line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--times", type=int, default=5, help="runs of each kind, in turns")
    args = parser.parse_args(argv)
    titles = ["program", "a step on ranks", "one process, estimated", "measured, alone", "measured beside others"]
    print(f"| {' | '.join(titles)} | estimated / measured |\n|{'---|' * 6}", flush=True)
    for name in args.names or PROGRAMS:
        rows = [_measure(name, args.steps, args.ranks) for _ in range(args.times)]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        cells = [f"{1000 * seconds:.0f} ms" for seconds in medians]
        ratios = [f"{medians[1] / measured:.2f}" for measured in medians[2:]]
        print(f"| {name} | {' | '.join(cells)} | {ratios[0]} alone, {ratios[1]} beside others |", flush=True)


def _measure(name: str, steps: int, num_ranks: int) -> tuple[float, ...]:
    """Return the seconds of a step on ranks, those estimated for one process, and those of plain processes."""
    speed = speed_on(num_ranks, name, steps)
    return speed.step_s, speed.one_process_s, plain_step(name, steps), plain_step(name, steps, num_ranks)


if __name__ == "__main__":
    main()
