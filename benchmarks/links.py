"""Compares ways of averaging gradients on slow networks: a step of training on 2 and 4 hosts, at several delays.

    python -m benchmarks.links [--hosts 2 4] [--ranks 2] [--mbit 1000 10000] [--delay-ms 0.1 1] [--rounds 3]

The hosts are network namespaces of this machine, joined by a switch in a process of its own that holds packets back
(``tests/integration/slow_network.py``), so the benchmark needs root. They share the machine's cores: where these are
too slow for the network, as with 10 Gb/s on two of them, it is they that are measured. The program is an MLP of 10
million parameters in 8 layers, with a batch of 16 for each rank, and an exchange of 40 MB in each step. All contenders
take turns; a figure is the median over the steps of all rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.integration.hosts import allowed
from tests.integration.namespaces import launcher
from tests.integration.slow_network import Link, slow_network

_WARM_STEPS, _STEPS = 4, 6
_WIDTH, _LAYERS, _BATCH = 1120, 8, 16


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each network and contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000, 10_000])
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args(argv)
    if not allowed():
        print("this user may not make network namespaces here")
        return 1
    logging.getLogger("lagom").setLevel(logging.ERROR)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # ranks are forked from this process, and a fork does not have OpenMP's threads
    print(
        "hosts  Mbit/s  delay, ms  way               a host sends, MB  a step, ms  quartiles      of DDP's time  "
        "a rank's core, ms"
    )
    for num_hosts in args.hosts:
        for mbit in args.mbit:
            for delay_ms in args.delay_ms:
                found = _measure(num_hosts, args.ranks, Link(mbit=mbit, delay_ms=delay_ms), args.only, args.rounds)
                for name, (times, sent, used) in found.items():
                    low, middle, high = statistics.quantiles(times, n=4)
                    of_ddp = middle / statistics.median(found["ddp"][0]) if "ddp" in found else float("nan")
                    print(
                        f"{num_hosts:5} {mbit:7g} {delay_ms:10g}  {name:16} {sent / 1e6:17.1f} {middle:11.1f}  "
                        f"{f'{low:.1f}-{high:.1f}':13} {of_ddp:10.2f}  {used:17.0f}",
                        flush=True,
                    )
    return 0


def _measure(
    num_hosts: int, num_ranks: int, link: Link, contenders: Sequence[str], rounds: int
) -> Mapping[str, tuple[Sequence[float], float, float]]:
    """Return for each contender the milliseconds of its steps, the bytes of a host and the core time of a rank.

    The bytes are the most that a host sends in a step; the core time is the most milliseconds that a rank uses in one.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, float] = {}
    used: dict[str, list[float]] = {name: [] for name in contenders}
    with slow_network(num_hosts, link) as (address, hosts), launcher(address, hosts, num_ranks) as runs:
        for _ in range(rounds):
            for name in contenders:
                function, settings = CONTENDERS[name]
                ranks = runs.call(function, distributed=name == "ddp", **settings)
                found[name] += [max(times) for times in zip(*(times for times, *_ in ranks), strict=True)]
                sent[name] = max(num_bytes for _, num_bytes, _ in ranks)
                used[name].append(max(ms for *_, ms in ranks))
                print(f"{name}: {sent[name] / 1e6:.1f} MB, {statistics.median(found[name]):.1f} ms", file=sys.stderr)
    return {name: (times, sent[name], statistics.median(used[name])) for name, times in found.items()}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU()) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(_WIDTH, 1))


Steps = tuple[list[float], float, float]
"""Milliseconds of each step after the first ones; the bytes that this host sends in a step; the milliseconds of a core
that this rank uses in a step."""


def _steps(model: torch.nn.Module) -> Steps:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.rand(_BATCH, _WIDTH), torch.rand(_BATCH, 1)
    times, sent, used = [], 0, 0.0
    for step in range(_WARM_STEPS + _STEPS):
        if step == _WARM_STEPS:
            sent, used = _num_sent(), time.process_time()
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return times[_WARM_STEPS:], (_num_sent() - sent) / _STEPS, 1e3 * (time.process_time() - used) / _STEPS


def _num_sent() -> int:
    """Return the bytes that this host has sent."""
    rows = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()]
    return next(int(row[9]) for row in rows if row[0] == "eth0:")


def by_lagom() -> Steps:
    """Train with lagom."""
    return _steps(_model())


def after_the_backward() -> Steps:
    """Train with lagom, and send no gradient before the backward has ended."""
    from lagom.gradients import overlap

    overlap.MIN_BYTES = 1 << 60
    return _steps(_model())


def by_ddp() -> Steps:
    """Train with DistributedDataParallel over gloo."""
    dist.init_process_group("gloo")
    return _steps(DistributedDataParallel(_model()))


CONTENDERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "ddp": (by_ddp, {}),
    "lagom": (by_lagom, {"batches": "per_rank"}),
    "no overlap": (after_the_backward, {"batches": "per_rank"}),
    "all ranks, gloo": (by_lagom, {"batches": "per_rank", "collectives": "gloo"}),
    "bf16": (by_lagom, {"batches": "per_rank", "gradient_compression": "bf16"}),
}
"""Function and settings of each contender."""


if __name__ == "__main__":
    sys.exit(main())
