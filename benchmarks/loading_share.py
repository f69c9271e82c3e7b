"""Measures which share of one process's work each rank has if loading takes most of it.

    python -m benchmarks.loading_share [KIND ...] [--ranks 2 4] [--times 3] [--hosts 2]

The programs decode PNGs of 224x224 (``benchmarks.loading``) and train a small CNN on them, in batches of 64. The share
is the CPU time of a rank for an epoch, with its workers, divided by that of the plain process: 0.5 on two ranks is
ideal, 1 gains nothing. It is the mean over the ranks, without the first epoch, in which lagom
examines loaders. Workers that a forkserver has started are not a rank's children, and their time is not counted.
Several hosts are network namespaces of this machine, which need root.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.loading import Photos, cnn
from lagom import experiment
from lagom.config import TorchDistributedConfig
from tests.integration.hosts import allowed, network
from tests.integration.namespaces import launcher

EPOCHS = 4


class Plain(Photos):
    """The photos as they are."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(self.files[index % 64])).convert("RGB"))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div_(255), index % 10


class Counted(Photos):
    """Counts its samples, so that every rank must load all of them."""

    count = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.count += 1
        return super().__getitem__(index)


KINDS: dict[str, tuple[Callable[[], Photos], dict[str, Any]]] = {
    "no workers": (Plain, {}),
    "no workers, random flips": (Photos, {}),
    "no workers, pinned": (Photos, {"pin_memory": True}),
    "no workers, samples counted": (Counted, {}),
    "2 workers": (Photos, {"num_workers": 2}),
    "2 workers, forkserver": (Photos, {"num_workers": 2, "multiprocessing_context": "forkserver"}),
}


def epochs(kind: str) -> list[float]:
    """Train; return the CPU seconds of each epoch, those of workers that have ended included."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, options = KINDS[kind]
    model, dataset = cnn(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    times = [_cpu_seconds()]
    for _ in range(EPOCHS):
        for x, y in DataLoader(dataset, 64, shuffle=True, **options):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        times.append(_cpu_seconds())
    return [after - before for before, after in itertools.pairwise(times)]


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def on_ranks(kind: str, num_ranks: int, num_hosts: int) -> list[list[float]]:
    """Train on ranks; return the CPU seconds of each epoch, for each rank."""
    if num_hosts == 1:
        config = TorchDistributedConfig(launcher="local", world_size=num_ranks, hparams={"kind": kind})
        return list(experiment.lagom(epochs, config).per_rank)
    with network(num_hosts) as (address, hosts), launcher(address, hosts, num_ranks // num_hosts) as runs:
        found: list[list[float]] = runs.call(epochs, hparams={"kind": kind})
        return found


def measure(kind: str, num_ranks: int, num_hosts: int = 1) -> float:
    """Run the program on ranks, or for 0 in a new process; return the CPU seconds of an epoch of a rank or process."""
    numbers = ["--ranks", str(num_ranks), "--hosts", str(num_hosts)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loading_share", "--run", kind, *numbers],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table in Markdown, a line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--times", type=int, default=3, help="runs of each kind, in turns")
    parser.add_argument("--hosts", type=int, default=1, help="hosts among which the ranks are divided")
    parser.add_argument("--run", choices=KINDS, help="train, and print the CPU seconds of an epoch")
    args = parser.parse_args(argv)
    if args.run:
        (num_ranks,) = args.ranks
        results = on_ranks(args.run, num_ranks, args.hosts) if num_ranks else [epochs(args.run)]
        print(json.dumps(statistics.mean(statistics.median(one[1:]) for one in results)))
        return
    if args.hosts > 1 and not allowed():
        parser.error("this user may not make network namespaces here, of which --hosts makes hosts; be root, with ip")
    if odd := [num for num in args.ranks if num % args.hosts]:
        parser.error(f"--ranks {odd[0]} cannot be divided among {args.hosts} hosts; give a multiple")
    print(f"| loader | s an epoch | {' | '.join(f'share on {num}' for num in args.ranks)} |")
    print(f"|{'---|' * (2 + len(args.ranks))}", flush=True)
    for kind in args.kinds or KINDS:
        runs = [[measure(kind, 0), *(measure(kind, num, args.hosts) for num in args.ranks)] for _ in range(args.times)]
        alone = statistics.median(run[0] for run in runs)
        cells = [f"{alone:.2f}"]
        for place in range(1, 1 + len(args.ranks)):
            shares = [run[place] / run[0] for run in runs]
            cells.append(f"{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
