"""Time per training step on 2 ranks: DDP by hand (torchrun, gloo), Accelerate (notebook_launcher), and lagom.

    python -m benchmarks.step [--rounds 5] [--task MLP]...

The programs (benchmarks/step_programs.py) are the same loop; lagom gets the one that knows of no ranks. All see the
same number of samples per rank and step, with one thread per rank. A step is all of the loop's body: fetching the
batch, zero_grad, forward, loss, backward, optimizer step. Contenders take turns, round after round, each time in new
processes; a round's number is the median of its steps after a warm-up, on the slowest rank. Accelerate needs
`pip install -c constraints.txt -e ".[bench]"`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.step_programs import TASKS, plain
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Batches
from lagom.errors import LagomError

WORLD_SIZE = 2
Times = dict[str, dict[str, list[float]]]
"""Seconds per step, by task and contender, a number per round."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print medians, ranges and ratios; 0 when the targets hold, else 1."""
    args = _arguments(argv)
    # For the ranks of all contenders, before any of them starts.
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("lagom").setLevel(logging.ERROR)
    wanted = [name for name in TASKS if not args.task or any(part in name for part in args.task)]
    times = measure(_contenders(), wanted, args.rounds)
    print("\n\n".join(report(name, times[name]) for name in wanted))
    return 0 if all(held for name in wanted for _, held in targets(times[name])) else 1


def measure(contenders: Mapping[str, Callable[[list[str]], dict[str, float]]], wanted: list[str], rounds: int) -> Times:
    """Let the contenders take turns; one that refuses is left out from then on, with a line that says why."""
    times: Times = {name: {} for name in wanted}
    able = dict(contenders)
    for number in range(rounds):
        for name, call in list(able.items()) if number % 2 else reversed(list(able.items())):
            try:
                found = call(wanted)
            except (LagomError, ValueError) as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
                del able[name]
                continue
            for task, seconds in found.items():
                times[task].setdefault(name, []).append(seconds)
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    return times


def report(task: str, times: Mapping[str, Sequence[float]]) -> str:
    """A table, and whether each target holds."""
    peer = statistics.median(times[DDP])
    lines = [f"{task + ', ' + str(TASKS[task].per_rank) + ' per rank':36} median ms      min      max   of DDP's"]
    for name in _contenders():
        if name in times:
            median = statistics.median(times[name])
            figures = f"{median * 1e3:9.3f} {min(times[name]) * 1e3:8.3f} {max(times[name]) * 1e3:8.3f}"
            lines.append(f"{name:36} {figures} {median / peer:9.2f}x")
    lines += [f"{'holds' if held else 'MISSED':7}{target}" for target, held in targets(times)]
    return "\n".join(lines)


def targets(times: Mapping[str, Sequence[float]]) -> list[tuple[str, bool]]:
    """What lagom promises, and whether it is so in these medians."""
    if "lagom, per_rank" not in times:
        return []
    held = statistics.median(times["lagom, per_rank"]) <= statistics.median(times[DDP])
    return [("lagom's per_rank takes no longer than DDP by hand", held)]


DDP = "DDP by hand, gloo"


def _contenders() -> dict[str, Callable[[list[str]], dict[str, float]]]:
    return {
        DDP: lambda wanted: _launched("ddp", wanted),
        "Accelerate": lambda wanted: _launched("accelerate", wanted),
        "lagom, split": lambda wanted: _lagom("split", wanted),
        "lagom, per_rank": lambda wanted: _lagom("per_rank", wanted),
        "lagom, whole": lambda wanted: _lagom("whole", wanted),
    }


def _lagom(batches: Batches, wanted: list[str]) -> dict[str, float]:
    hparams = {"world_size": WORLD_SIZE, "batch_is_ranks_own": batches == "per_rank", "wanted": wanted}
    config = TorchDistributedConfig(hparams=hparams, world_size=WORLD_SIZE, launcher="local", batches=batches)
    return _slowest(list(experiment.lagom(plain, config).per_rank))


def _launched(kind: str, wanted: list[str]) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = ["torch.distributed.run", f"--nproc_per_node={WORLD_SIZE}", f"--master_port={port}", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"world_size": WORLD_SIZE, "wanted": wanted, "folder": folder, "port": port}
        command = [sys.executable, "-m", *(launcher if kind == "ddp" else []), "benchmarks.step_programs", kind]
        done = subprocess.run([*command, json.dumps(arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{kind} failed: {done.stderr[-2000:]}")
        return _slowest([json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())])


def _slowest(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    assert len(found) == WORLD_SIZE
    return {name: max(one[name] for one in found) for name in found[0]}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time per training step, against DDP and Accelerate.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--task", action="append", help="only tasks whose name has this in it; may be repeated")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
