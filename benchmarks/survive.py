"""Measures the time to begin a run again after a killed rank, and the cost of the protection until then.

    python -m benchmarks.survive [--rounds 5] [--only "1 GB of state"]

It runs on 2 ranks of this machine, and of Spark local[2].

- The first table has the seconds from the kill of rank 1 to the end of the first step of the next attempt. These
  include the warm launch of a run.
- The second table has medians of the same program with max_failures=3 and 0, in turns: the time of a short training
  step, and of files that rank 0 writes.
- The third table is of runs with snapshots, with steps and states of several sizes. It has the seconds from the kill to
  the beginning and to the end of the next step, and rank 0's processor time per step with and without snapshots, in
  turns.

All tables together take more than an hour; ``--only`` prints the third table for one size. How the times depend on the
place in a pass is measured by ``benchmarks.survive_passes``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher
from lagom.result import Result

WORLD_SIZE = 2
SIZES = {"1 MB of state": (289, 64, 450), "100 MB of state": (2887, 16, 25), "1 GB of state": (9130, 8, 18)}
"""Width of the square layer, batches of a pass over the data, and number of passes.

The state is the layer's weights and the two states of Adam.
"""
PROTECTION: dict[str, Any] = {"snapshot_every_s": "auto"}
"""Settings of a run that goes on in mid-epoch."""
LAUNCHERS: tuple[Launcher, ...] = ("local", "spark")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
    args = _arguments(argv)
    if args.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            show_cost(Path(folder), args.rounds, {args.only: SIZES[args.only]})
        return 0
    from benchmarks import peers  # not above: ranks import this file, and Spark's modules would count as theirs

    with peers.spark(f"local[{WORLD_SIZE}]"), tempfile.TemporaryDirectory() as folder:
        for launcher in LAUNCHERS:
            seconds = [recovery_s(launcher, Path(folder, f"{launcher}-{number}")) for number in range(args.rounds + 1)]
            print(f"{launcher:6} from the kill to the next step: {_shown(seconds[1:], 's')}")
        for name, (protected, alone) in costs(Path(folder), args.rounds).items():
            ratio = statistics.median(protected) / statistics.median(alone)
            print(f"{name:22} {_shown(protected, 'us')}, without {_shown(alone, 'us')}: {ratio:.3f} times")
        show_cost(Path(folder), args.rounds, SIZES)
    return 0


def show_cost(folder: Path, rounds: int, sizes: Mapping[str, tuple[int, int, int]]) -> None:
    """Print the third table."""
    for name, size in sizes.items():
        places = [folder / f"{name}-{number}" for number in range(rounds)]
        begins, ends = zip(*(going_on_s(size, place) for place in places), strict=True)
        shown = f"{_shown(begins, 's')}; {_shown(ends, 's')} to its end"
        print(f"{name:18} from the kill to the next step: {shown}")
        found: dict[bool, dict[str, list[float]]] = {True: {"us": [], "wall_us": []}, False: {"us": [], "wall_us": []}}
        for number in range(rounds):
            for protects in (True, False) if number % 2 else (False, True):
                settings = PROTECTION if protects else {}
                value = _run_loops(size, folder / name, settings).per_rank[0]
                for key, values in found[protects].items():
                    values.append(value[key])
        for key, what in ("us", "processor time of a step"), ("wall_us", "a step"):
            with_, without = found[True][key], found[False][key]
            ratio = statistics.median(with_) / statistics.median(without)
            print(f"{name:18} {what} {_shown(with_, 'us')}, without {_shown(without, 'us')}: {ratio:.3f} times")


def _run_loops(size: tuple[int, int, int], run_dir: Path, settings: Mapping[str, Any]) -> Result:
    hparams = {"size": size, "over": str(run_dir / "over")}
    config = TorchDistributedConfig(
        world_size=WORLD_SIZE, launcher="local", run_dir=run_dir, hparams=hparams, **settings
    )
    return experiment.lagom(loops, config)


def going_on_s(size: tuple[int, int, int], folder: Path) -> tuple[float, float]:
    """Return the seconds from the kill of rank 1 to the beginning and to the end of the first step after it."""
    folder.mkdir()
    killed_at: list[float] = []

    def kill() -> None:
        while not (pids := _pids(folder, protected=True)):
            time.sleep(0.01)
        killed_at.append(time.time())
        os.kill(pids[1], signal.SIGKILL)
        (folder / "over").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    result = _run_loops((*size[:2], 100 * size[2]), folder, PROTECTION)
    thread.join()
    assert "batch" in result.failures[0]["resumed_from"], result.failures
    value = result.per_rank[0]
    begin = min(begin for begin in value["begins"] if begin > killed_at[0])
    return begin - killed_at[0], min(end for end in value["ends"] if end > begin) - killed_at[0]


def loops(size: tuple[int, int, int], over: str) -> Mapping[str, Any]:
    """Train a layer with Adam on a loader, for one pass more when there is a file ``over``.

    Returns:
        The processor time per step, and the times at which steps began and ended.
    """
    width, num_batches, num_passes = size
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.ones(8 * num_batches, width)
    begins: list[float] = []
    ends: list[float] = []
    used, began = time.process_time(), time.perf_counter()
    for _ in range(num_passes):
        is_last = os.path.exists(over)  # looked at before the pass, so that steps follow the kill
        for (rows,) in DataLoader(TensorDataset(x), batch_size=8):
            begins.append(time.time())
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            ends.append(time.time())
        if is_last:
            break
    took = {"us": time.process_time() - used, "wall_us": time.perf_counter() - began}
    return {name: seconds / len(ends) * 1e6 for name, seconds in took.items()} | {"begins": begins, "ends": ends}


def recovery_s(launcher: Launcher, folder: Path) -> float:
    """Return the seconds from the kill of rank 1 to the end of the first step of the next attempt."""
    folder.mkdir()
    killed_at: list[float] = []

    def kill() -> None:
        while not (pids := _pids(folder)):
            time.sleep(0.01)
        time.sleep(1.0)
        killed_at.append(time.time())
        os.kill(pids[1], signal.SIGKILL)
        (folder / "killed").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    config = TorchDistributedConfig(
        world_size=WORLD_SIZE, launcher=launcher, run_dir=folder, hparams={"over": str(folder / "killed")}
    )
    result = experiment.lagom(step_until, config)
    thread.join()
    assert len(result.failures) == 1
    return float(result.per_rank[0]) - killed_at[0]


def step_until(over: str) -> float:
    """Train for ever, or, if the file ``over`` exists at the beginning, for one step; return the time at its end."""
    step = _step()
    is_last = os.path.exists(over)
    while True:
        step()
        if is_last:
            return time.time()


def costs(folder: Path, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return microseconds of each operation with and without protection, in turns."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(rounds + 1):
        for place, max_failures in enumerate((3, 0) if number % 2 else (0, 3)):
            config = TorchDistributedConfig(
                world_size=WORLD_SIZE,
                launcher="local",
                run_dir=None,
                max_failures=max_failures,
                hparams={"folder": str(folder / f"files-{number}-{place}")},
            )
            for name, value in experiment.lagom(timed, config).per_rank[0].items():
                if number:
                    found.setdefault(name, ([], []))[max_failures == 0].append(value)
    return found


def timed(folder: str) -> Mapping[str, float]:
    """Return the medians of some operations, in microseconds."""
    step = _step()
    os.mkdir(folder)
    state = {"weights": torch.zeros(1000)}

    def write() -> None:
        with open(f"{folder}/state.txt", "w") as file:
            file.write("state")

    def append() -> None:
        with open(f"{folder}/rows.csv", "a") as file:
            file.write("row\n")

    def read() -> None:
        with open(f"{folder}/rows.csv") as file:
            file.readline()

    return {
        "step": _median_us(step, 2000),
        "append to a file": _median_us(append, 500),
        "write a file": _median_us(write, 500),
        "read a file": _median_us(read, 500),
        "torch.save": _median_us(lambda: torch.save(state, f"{folder}/last.pt"), 200),
    }


def _step() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.ones(16, 32), torch.ones(16, 1)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def _median_us(call: Callable[[], None], num: int) -> float:
    times = []
    for _ in range(num):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def _pids(folder: Path, *, protected: bool = False) -> list[int]:
    for path in folder.glob("*/run.json"):
        facts = json.loads(path.read_text())
        ranks = facts["ranks"] if not protected or facts.get("snapshots") else {}
        if len(ranks) == WORLD_SIZE and all("pid" in one for one in ranks.values()):
            return [ranks[str(rank)]["pid"] for rank in range(WORLD_SIZE)]
    return []


def _shown(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.2f} {unit} ({min(values):.2f}-{max(values):.2f})"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to begin again after a loss, and its cost until then.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SIZES, help="measure only the cost of snapshots with this state")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
