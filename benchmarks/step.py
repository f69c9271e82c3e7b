"""Measures the time per training step on 2 ranks with DDP by hand (torchrun, gloo), Accelerate, and lagom.

    python -m benchmarks.step [--starts 7] [--turns 20] [--task MLP]...

All programs (benchmarks/step_programs.py) have the same loop; lagom runs the one for a single process. All have the
same number of samples per rank and step, and one thread per rank. A step is the whole body of the loop: fetching the
batch, zero_grad, forward, loss, backward, optimizer step.

All contenders are alive at once and take turns of a few steps each, so that other load on the machine slows all of them
equally. A turn's time is that of its slowest rank; a ratio compares two turns that follow each other.

The speed of a process also depends on the addresses of its memory: in one process the CNN's step may always take a
tenth longer than in another process of the same program. So all contenders are started several times. The figures are
the median and the quartiles over starts of each start's median.

Accelerate needs `pip install -c constraints.txt -e ".[bench]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from benchmarks.step_programs import TASKS

WORLD_SIZE = 2
WARM_UP = 3
"""Turns at the start that do not count."""
CONTENDERS = {
    "ddp": "DDP by hand, gloo",
    "accelerate": "Accelerate",
    "split": "lagom, split",
    "per_rank": "lagom, per_rank",
    "gloo": "lagom, per_rank, over gloo",
    "whole": "lagom, whole",
}
Times = Mapping[str, Sequence[float]]
"""Measurements of one start: seconds per step in each turn, by contender."""


@dataclass
class Contender:
    """The processes of one contender, which wait until ``turn`` starts their next steps."""

    process: subprocess.Popen[str]
    errors: IO[str]
    ranks: dict[int, Any] = field(default_factory=dict)

    def turn(self, steps: int) -> float:
        """Start a turn of ``steps`` steps on all ranks; return the seconds per step of the slowest rank."""
        for lines in self.ranks.values():
            lines.write("go\n")
            lines.flush()
        return max(float(json.loads(lines.readline())) for lines in self.ranks.values()) / steps


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print medians, quartiles and ratios; return 0 if the targets hold, else 1."""
    args = _arguments(argv)
    wanted = [name for name in TASKS if not args.task or any(part in name for part in args.task)]
    starts: dict[str, list[Times]] = {name: [] for name in wanted}
    for number in range(args.starts):
        with contenders(wanted, args.turns) as able:
            for name in wanted:
                starts[name].append(measure(able, name, args.turns))
        print(f"start {number + 1} of {args.starts}: done", file=sys.stderr)
    print("\n\n".join(report(name, starts[name]) for name in wanted))
    return 0 if all(held for name in wanted for _, held in targets(starts[name])) else 1


def measure(able: Mapping[str, Contender], task: str, turns: int) -> Times:
    """Let the contenders take turns in alternating order; return their times."""
    times: dict[str, list[float]] = {name: [] for name in able}
    for number in range(WARM_UP + turns):
        for name in list(able) if number % 2 else reversed(list(able)):
            seconds = able[name].turn(TASKS[task].steps)
            if number >= WARM_UP:
                times[name].append(seconds)
    return times


def report(task: str, starts: Sequence[Times]) -> str:
    """Return a table, and a line for each target that says whether it holds."""
    title = f"{task}, {TASKS[task].per_rank} per rank"
    lines = [f"{title:36} median ms   quartiles ms     of DDP's  quartiles"]
    for name in (name for name in CONTENDERS if all(name in times for times in starts)):
        low, median, high = _quartiles([1e3 * statistics.median(times[name]) for times in starts])
        less, ratio, more = _quartiles([_ratio(times, name) for times in starts])
        figures = f"{median:9.3f} {low:8.3f} {high:8.3f} {ratio:9.2f}x  {less:.2f} {more:.2f}"
        lines.append(f"{CONTENDERS[name]:36} {figures}")
    lines += [f"{'holds' if held else 'MISSED':7}{target}" for target, held in targets(starts)]
    return "\n".join(lines)


def targets(starts: Sequence[Times]) -> list[tuple[str, bool]]:
    """Return each target as text, and whether it holds."""
    ratio = statistics.median(_ratio(times, "per_rank") for times in starts)
    return [("lagom's per_rank takes no longer than DDP by hand", ratio <= 1)]


def _ratio(times: Times, name: str) -> float:
    return statistics.median(one / peer for one, peer in zip(times[name], times["ddp"], strict=True))


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


@contextmanager
def contenders(wanted: list[str], turns: int) -> Iterator[dict[str, Contender]]:
    """Start all contenders, and yield those whose ranks are ready; print why another contender is left out."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
        arguments = {
            "port": listener.getsockname()[1],
            "world_size": WORLD_SIZE,
            "tasks": wanted,
            "turns": WARM_UP + turns,
        }
        started = {name: _started(name, arguments, folder) for name in CONTENDERS}
        try:
            _connect(listener, started)
            yield {name: one for name, one in started.items() if len(one.ranks) == WORLD_SIZE}
            for one in started.values():
                one.process.wait(timeout=60)
        finally:
            for one in started.values():
                one.process.terminate()
                one.process.wait()
                one.errors.close()


def _started(name: str, arguments: Mapping[str, object], folder: str) -> Contender:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = ["torch.distributed.run", f"--nproc_per_node={WORLD_SIZE}", f"--master_port={port}", "-m"]
    command = [sys.executable, "-m", *(torchrun if name == "ddp" else []), "benchmarks.step_programs", name]
    errors = open(os.path.join(folder, name), "w+")  # noqa: SIM115  (closed with its contender)
    process = subprocess.Popen(
        [*command, json.dumps(arguments)], stdout=subprocess.DEVNULL, stderr=errors, text=True, env=_environment()
    )
    return Contender(process, errors)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _connect(listener: socket.socket, started: Mapping[str, Contender]) -> None:
    listener.settimeout(1)
    deadline = time.monotonic() + 120
    told: set[str] = set()
    while any(len(one.ranks) < WORLD_SIZE and name not in told for name, one in started.items()):
        for name, one in started.items():
            if one.process.poll() is not None and name not in told:
                one.errors.seek(0)
                print(f"{CONTENDERS[name]}: left out: {one.errors.read()[-1000:]}", file=sys.stderr)
                told.add(name)
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
    if "ddp" in told or "per_rank" in told:
        raise RuntimeError("there is nothing to compare without DDP and lagom's per_rank")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time per training step, against DDP and Accelerate.")
    parser.add_argument("--starts", type=int, default=7, help="how often all contenders are started anew")
    parser.add_argument("--turns", type=int, default=20, help="turns that count, of each contender in each start")
    parser.add_argument("--task", action="append", help="only tasks whose name has this in it; may be repeated")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
