"""Measures the time from the kill of a rank to the next batch from a snapshot, early and late in a pass.

    python -m benchmarks.survive_passes [--rounds 5]

Two ranks of this machine read batches of one sample. To go on within a pass over tensors, lagom skips their indices;
in a Parquet file, it reads the row group of the next batch.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.data import ParquetDataset

WORLD_SIZE = 2
GAP_S = 0.2
"""A longer time between two batches is no batch's own time: the run was lost and has gone on from a snapshot."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each pass."""
    parser = argparse.ArgumentParser(description="Time from a kill to the next batch, early and late in a pass.")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for program, after in ((walk, 10_000), (walk, 1_000_000), (walk_table, 10_000), (walk_table, 100_000)):
            show_within_pass(program, after, Path(folder), args.rounds)
    return 0


def show_within_pass(program: Callable[..., list[float]], after: int, folder: Path, rounds: int) -> None:
    """Print the seconds from the kill to the next batch, ``after`` batches into a pass."""
    name = program.__name__
    seconds = [within_pass_s(program, after, folder / f"{name}-{after}-{number}") for number in range(rounds)]
    shown = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
    print(f"{name:10} from the kill to the next batch, {after:,} batches into a pass: {shown} s")


def within_pass_s(program: Callable[..., list[float]], after: int, folder: Path) -> float:
    """Return the seconds from the kill of rank 1 to the next batch of ``program``.

    The rank is killed when a snapshot is at least ``after`` batches into the pass.
    """
    folder.mkdir()
    killed_at: list[float] = []
    over = threading.Event()

    def kill() -> None:
        while not killed_at and not over.is_set():
            time.sleep(0.01)
            for path in folder.glob("*/run.json"):
                facts = json.loads(path.read_text())
                if facts.get("snapshots", {"place": [0, 0]})["place"][1] >= after:
                    killed_at.append(time.time())
                    os.kill(facts["ranks"]["1"]["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    config = TorchDistributedConfig(
        world_size=WORLD_SIZE,
        launcher="local",
        run_dir=folder,
        hparams={"num": after + 200_000, "folder": str(folder)},
        snapshot_every_s=1.0,
    )
    result = experiment.lagom(program, config)
    over.set()
    thread.join()
    assert killed_at, "the run ended before it had a snapshot so far into a pass"
    assert "batch" in result.failures[0]["resumed_from"], result.failures
    return float(min(end for end in result.per_rank[0] if end > killed_at[0])) - killed_at[0]


def walk(num: int, folder: str) -> list[float]:
    """Read ``num`` samples, one at a time; return the times of the first batch and of batches that took long."""
    return _gaps(DataLoader(TensorDataset(torch.arange(num)), batch_size=1, shuffle=True))


def walk_table(num: int, folder: str) -> list[float]:
    """Read ``num`` rows of a Parquet file in batches of one, as ``walk`` does."""
    path = f"{folder}/rows.parquet"
    parquet.write_table(pyarrow.table({"x": list(range(num))}), path, row_group_size=10_000)
    data = ParquetDataset(path)
    return _gaps(DataLoader(data, batch_sampler=data.batches(1, shuffle=True)))


def _gaps(loader: DataLoader[Any]) -> list[float]:
    found, last = [], 0.0
    for _ in loader:
        now = time.time()
        if now - last > GAP_S:
            found.append(now)
        last = now
    return found


if __name__ == "__main__":
    sys.exit(main())
