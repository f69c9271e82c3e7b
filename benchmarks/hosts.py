"""Compares collectives on two hosts: lagom's (shared memory, then one rank per host), encrypted too, and gloo's.

    python -m benchmarks.hosts [--ranks 2] [--turns 15]

The hosts are network and process namespaces of this machine, joined by a bridge, so the benchmark needs root. They
share the machine's cores, and their network is as fast as its memory. On real hosts the network counts for more, and
gloo sends more over it with every rank that a host has.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lagom.exchange.group import Group
from lagom.exchange.run_store import SealedStore, all_gather_by
from lagom.exchange.sockets.encryption import NO_CREDENTIALS, Credentials
from lagom.wire.tls import contexts_of_ranks, key_and_certificate
from tests.integration.hosts import allowed, network

NUM_HOSTS = 2
SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)
"""Bytes of the tensors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, and print milliseconds and ratios; return 0 if both ways give equal results, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args(argv)
    if not allowed():
        print("this user may not make network namespaces here")
        return 1
    certificate = key_and_certificate()
    with network(NUM_HOSTS) as (address, hosts):
        world_size = NUM_HOSTS * args.ranks
        store = TCPStore(address, 0, world_size + 1, is_master=True, wait_for_workers=False)
        running = []
        for i, host in enumerate(hosts):
            commands = []
            for number in range(i * args.ranks, (i + 1) * args.ranks):
                settings = [address, store.port, number, world_size, args.ranks, host.address, args.turns, certificate]
                commands.append(shlex.join([sys.executable, "-m", "benchmarks.hosts", json.dumps(settings)]))
            # One shell for all ranks of a host, since each use of its command makes a new process namespace.
            shell = " & ".join(commands) + " & wait"
            running.append(subprocess.Popen([*host.command, "sh", "-c", shell], stdout=subprocess.PIPE, text=True))
        lines = [one.communicate()[0] for one in running]
    print("\n".join(line for line in lines if line))
    return 0 if "".join(lines).count("\n") == len(SIZES) * len(EXCHANGES) else 1


def rank(address: str, port: int, number: int, world_size: int, per_host: int, ip: str, turns: int, pem: str) -> None:
    """Run one rank, which times lagom's and gloo's exchanges in turns; rank 0 prints the medians."""
    torch.set_num_threads(1)
    store = TCPStore(address, port, is_master=False)

    def gloo(kin: str, name: str, place: int, size: int) -> Any:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=ip)]
        options._timeout = timedelta(seconds=60)
        return kind(PrefixStore(f"{kin}/{name}", store), place, size, options)

    def made(name: str, *, shares_memory: bool, credentials: Credentials = NO_CREDENTIALS) -> Group:
        gather = all_gather_by(SealedStore(store, b""), name, number, world_size, 60.0)
        make = partial(gloo, name)
        return Group(number, world_size, gather, make, ip=ip, shares_memory=shares_memory, credentials=credentials)

    ours, flat = made("ours", shares_memory=True), made("flat", shares_memory=False)
    secret = made("secret", shares_memory=True, credentials=Credentials(b"", *contexts_of_ranks(pem)))
    groups = {"ours": ours, "secret": secret, "flat": flat}
    for what, exchange in EXCHANGES.items():
        for size in SIZES:
            times: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(turns):
                results = []
                for name, group in groups.items():
                    one = torch.full((size // 4,), float(number))
                    group.barrier()
                    start = time.perf_counter()
                    results.append(exchange(group, one))
                    times[name].append(time.perf_counter() - start)
                assert all(torch.equal(one, results[0]) for one in results), f"the results of {what} differ"
            assert ours.sums_itself, "no shared memory"
            if number == 0:
                mine, hidden, theirs = (statistics.median(times[name]) * 1e3 for name in groups)
                say = f"{what} of {size >> 10} KB on {world_size // per_host} x {per_host} ranks: {mine:.2f} ms"
                say += f", encrypted {hidden:.2f} ms, {hidden / mine:.1f} times"
                print(f"{say}, gloo {theirs:.2f} ms, {theirs / mine:.1f} times", flush=True)
    flat.barrier()


def _all_reduced(group: Group, one: torch.Tensor) -> torch.Tensor:
    group.all_reduce(one)
    return one


def _broadcast(group: Group, one: torch.Tensor) -> torch.Tensor:
    group.broadcast(one, 1)
    return one


def _gathered(group: Group, one: torch.Tensor) -> torch.Tensor:
    part = one[: len(one) // group.world_size]
    group.all_gather_into(one := torch.empty_like(one), part)
    return one


def _reduce_scattered(group: Group, one: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(one) // group.world_size)
    group._transports.choose("reduce_scatter", one, "sum").reduce_scatter(out, one).wait()
    return out


EXCHANGES = {
    "all_reduce": _all_reduced,
    "broadcast": _broadcast,
    "all_gather": _gathered,
    "reduce_scatter": _reduce_scattered,
}
"""Collectives to measure. The larger of a rank's input and output has the same size in all of them."""


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    if len(sys.argv) > 1 and sys.argv[1].startswith("["):
        rank(*json.loads(sys.argv[1]))
    else:
        sys.exit(main())
