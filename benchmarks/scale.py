"""Measures messages between many ranks on many hosts: joining, an agreement, a small gradient, sockets and memory.

    python -m benchmarks.scale [--hosts 2 8 16 32] [--ranks 8] [--turns 30] [--without-mesh]

The hosts are network namespaces of this machine, joined by a bridge, so the benchmark needs root. In each of them a
process imports torch and forks its ranks, which train nothing. ``rounds`` is what lagom does over several hosts
(``HostMessages``); ``mesh`` connects every rank with every other, as lagom did before and as gloo does. Ranks share the
cores of this machine: times say how much work there is in all, and on real hosts it is spread over their cores.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from lagom.exchange.agreement_exchange import memory
from lagom.exchange.host_messages import HostMessages, connect_messages, partners
from lagom.exchange.hosts import HostTransport
from lagom.exchange.run_store import SealedStore, all_gather_by
from lagom.exchange.shared_memory import shared
from lagom.exchange.sockets.connect import GatherTexts, connected, host_identity, listen
from lagom.exchange.sockets.encryption import Credentials
from lagom.exchange.sockets.mesh import Mesh
from lagom.exchange.sockets.rank_store import RankStore
from lagom.exchange.sockets.rounds import rounds
from lagom.exchange.sockets.value_client import ValueClient
from lagom.exchange.sockets.value_server import ValueServer
from lagom.exchange.transport import Merging
from lagom.patching.replace import replaced
from tests.integration.hosts import allowed, network

KEY = b"a key of 32 bytes for this run.."
TIMEOUT_S = 300.0
GRADIENT = 1000
"""Bytes of the small gradient, float64, that a rank sends along with a signature."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each number of hosts and each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 8, 16, 32])
    parser.add_argument("--ranks", type=int, default=8, help="of each host")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--without-mesh", action="store_true", help="leave out the full mesh")
    args = parser.parse_args(argv)
    if not allowed():
        print("this user may not make network namespaces here")
        return 1
    print(
        "hosts ranks way     join s  the store's core s  agree ms  of a core  gradient ms  "
        "a rank's sockets, messages and bytes to agree, at most"
    )
    for num_hosts in args.hosts:
        for way in ("rounds",) if args.without_mesh else ("rounds", "mesh"):
            _print(num_hosts, num_hosts * args.ranks, way, _measure(num_hosts, args.ranks, way, args.turns))
    print("\ncalculated, 32 ranks a host: sockets, messages and bytes sent in an agreement by a first rank; a mesh's")
    for world_size in (1000, 10_000):
        homes = [list(range(i, min(i + 32, world_size))) for i in range(0, world_size, 32)]
        most = max(len(partners(homes, home[0])) for home in homes)
        sent = _messages(len(homes))
        print(f"{world_size} ranks: {most}, {sent}, {sent * 72}; {world_size - 1}, {world_size - 1}, {world_size * 40}")
    return 0


def _messages(num_hosts: int) -> int:
    """Return the messages that a host's first rank sends in an exchange, for the host where they are most."""
    return max(sum(len(one.receivers) for one in rounds(num_hosts, host)) for host in range(num_hosts))


def _print(num_hosts: int, world_size: int, way: str, found: Sequence[dict[str, float]]) -> None:
    def most(what: str) -> float:
        return max(one[what] for one in found)

    line = f"{num_hosts:5} {world_size:5} {way:7} {most('join'):6.2f} {most('store'):19.2f} {1e3 * most('agree'):9.2f}"
    line += f" {1e3 * most('used'):10.2f} {1e3 * most('gradient'):12.2f}"
    print(f"{line} {most('sockets'):8.0f} {most('messages'):8.0f} {most('bytes'):8.0f}", flush=True)
    if way == "rounds":
        assert most("messages") == _messages(num_hosts), "the rule that is used for more hosts is another"


def _measure(num_hosts: int, num_ranks: int, way: str, turns: int) -> list[dict[str, float]]:
    with network(num_hosts) as (address, hosts):
        world_size = num_hosts * num_ranks
        store = TCPStore(address, 0, world_size + 1, is_master=True, wait_for_workers=False)
        running = []
        listener = listen(socket.AF_INET, (address, 0))
        ValueServer(listener, range(world_size), Credentials(KEY), TIMEOUT_S)  # in a real run, rank 0 has this server
        door = listener.getsockname()[1]
        for i, host in enumerate(hosts):
            settings = [address, store.port, door, i * num_ranks, num_ranks, world_size, host.address, way, turns]
            command = [*host.command, sys.executable, "-m", "benchmarks.scale", json.dumps(settings)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        used = time.process_time()
        texts = [one.communicate()[0] for one in running]
        used = time.process_time() - used  # time of the thread that serves the store, since this thread only waits
    return [json.loads(line) | {"store": used} for text in texts for line in text.splitlines()]


def run_host(
    address: str, port: int, door: int, first: int, num_ranks: int, world_size: int, ip: str, way: str, turns: int
) -> None:
    """Fork the ranks of one host, and print what each of them has measured."""
    store = TCPStore(address, port, world_size + 1, is_master=False, wait_for_workers=False)
    store.add("hosts", 1)
    while store.add("hosts", 0) < world_size // num_ranks:  # wait until all hosts have imported torch
        time.sleep(0.05)
    children = []
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all objects
    gc.disable()
    for rank in range(first, first + num_ranks):
        if (pid := os.fork()) == 0:
            try:
                line = json.dumps(_rank((address, door), rank, world_size, ip, way, turns)) + "\n"
                os.write(1, line.encode())  # one write, so that lines of several ranks do not mix in their common pipe
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _rank(door: tuple[str, int], rank: int, world_size: int, ip: str, way: str, turns: int) -> dict[str, float]:
    start = time.monotonic()
    store = RankStore(ValueClient(door, rank, Credentials(KEY), TIMEOUT_S).ask, timedelta(seconds=TIMEOUT_S))
    gather = all_gather_by(SealedStore(store, KEY), way, rank, world_size, TIMEOUT_S)
    before = _sockets()
    messages: Any = _rounds(rank, gather, ip) if way == "rounds" else _mesh(rank, gather, ip)
    messages.exchange(b"")
    joined = time.monotonic() - start
    with _counted() as sent:
        used = time.thread_time()
        agree = _median(lambda: messages.exchange(b"s" * 32), turns)
        used = (time.thread_time() - used) / turns
    body = memoryview(bytearray(os.urandom(GRADIENT)))
    adding = Merging(_added, _added)
    send: Callable[[], object] = lambda: messages.exchange(b"s" * 32, body)  # noqa: E731
    if isinstance(messages, HostMessages):
        send = lambda: messages.merge(b"s" * 32, body, adding)  # noqa: E731
    gradient = _median(send, turns)
    counts = {"messages": sent[0] / turns, "bytes": sent[1] / turns, "used": used}
    return {"join": joined, "agree": agree, "gradient": gradient, "sockets": _sockets() - before, **counts}


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Yield a list of two counts: messages that this rank sends by sockets in the block, and their bytes."""
    swap, exchange, sent = Mesh.swap, Mesh.exchange, [0, 0]

    def counted_swap(self: Mesh, messages: Mapping[int, bytearray], senders: Sequence[int]) -> list[memoryview]:
        sent[0] += len(messages)
        sent[1] += sum(map(len, messages.values()))
        return swap(self, messages, senders)

    def counted_exchange(self: Mesh, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        rows = exchange(self, head, body)
        sent[0] += len(rows) - 1
        sent[1] += len(head) * (len(rows) - 1)
        return rows

    with replaced(Mesh, "swap", counted_swap), replaced(Mesh, "exchange", counted_exchange):
        yield sent


def _added(rows: Sequence[memoryview]) -> memoryview:
    """Return the sum of rows of float64."""
    total, *others = (torch.frombuffer(row, dtype=torch.float64) for row in rows)
    for other in others:
        total = total + other
    return memory(total)


def _rounds(rank: int, gather: GatherTexts, ip: str) -> Mesh | HostMessages:
    found = shared(rank, gather, TIMEOUT_S, 1, KEY)
    assert not isinstance(found, str), found
    homes, near = found
    hosts = HostTransport(near[0] if near else None, None, homes, rank)
    return connect_messages(rank, ip, gather, Credentials(KEY), TIMEOUT_S, hosts)


def _mesh(rank: int, gather: GatherTexts, ip: str) -> Mesh:
    return Mesh(connected(rank, None, gather(host_identity()), ip, gather, Credentials(KEY), "messages"), TIMEOUT_S)


def _median(call: Callable[[], object], turns: int) -> float:
    seconds = []
    for _ in range(turns):
        start = time.monotonic()
        call()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds)


def _sockets() -> int:
    """Return the number of open sockets of this process."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor by which the folder was listed is closed now
            found += os.readlink(fd).startswith("socket:")
    return found


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        run_host(*json.loads(sys.argv[1]))
    else:
        sys.exit(main())
