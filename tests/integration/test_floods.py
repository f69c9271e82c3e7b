"""Strangers on another host flood each port that a rank opens; the run ends with the right numbers all the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.doors import listening_in
from tests.integration import hosts, programs

pytestmark = pytest.mark.soak

_HELLO = 52
"""Bytes of a rank's proof."""
_NONCE = 16
"""Bytes that a stranger is told."""
_MOST = 2000
"""Connections to one port."""
_GARBAGE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", os.urandom(_HELLO), os.urandom(40_000))


class Flood:
    """Connects with each port that opens on the hosts of ``subnet``, says all kinds of things, and stays."""

    def __init__(self, subnet: str) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        """Connections with each port."""
        self.most_told = 0
        """Most bytes that any stranger was told."""
        self._frames: list[bytes] = []
        number = subnet.rpartition(".")[2]
        self._pids = {f"{subnet}.{10 + host}": self._a_process(f"lgh{number}n{host}") for host in range(2)}
        self._known = {(ip, port) for ip, pid in self._pids.items() for port in listening_in(pid)}  # Spark's own
        self._over = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._attack, args=(ip,)) for ip in self._pids]

    @contextlib.contextmanager
    def against(self, frames: list[bytes]) -> Iterator[None]:
        """Attack meanwhile, also by what ranks have said in ``frames``."""
        self._frames = frames
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()
            for one in self._open:
                one.setblocking(False)
                with one, contextlib.suppress(OSError):
                    self.most_told = max(self.most_told, len(one.recv(1000)))

    def _a_process(self, namespace: str) -> int:
        found = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
        return int(found.split()[0])

    def _attack(self, ip: str) -> None:
        kinds = itertools.cycle(range(len(_GARBAGE) + 2))
        while not self._over.wait(0.001):
            for port in listening_in(self._pids[ip]):
                if (ip, port) not in self._known and self.counts[ip, port] < _MOST:
                    self._burst(ip, port, kinds)

    def _burst(self, ip: str, port: int, kinds: Iterator[int]) -> None:
        for _ in range(100):
            try:
                one = socket.create_connection((ip, port), timeout=1.0)
            except OSError:  # all ranks have come, or as many strangers wait already as the system keeps
                return
            self._open.append(one)
            self.counts[ip, port] += 1
            kind = next(kinds)
            hellos = [said for frame in self._frames[-2000:] if len(said := hosts.payload(frame)) == _HELLO]
            with contextlib.suppress(OSError):
                one.sendall(_GARBAGE[kind] if kind < len(_GARBAGE) else (hellos or [b""])[-1])


def join_again_and_again() -> list[float]:
    """Sums over the ranks, in groups that are made meanwhile and in one that is there."""
    dist.init_process_group()
    sums = []
    for number in range(40):
        group = dist.new_group()
        for one in (group, None):
            total = torch.full((50_000,), float(number * (dist.get_rank() + 1)), dtype=torch.float64)
            dist.all_reduce(total, group=one)
            assert bool((total == total[0]).all())
            sums.append(total[0].item())
        time.sleep(0.05)
    return sums


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for the strangers' ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spark", ["foreign", "foreign-encrypted"], indirect=True)
@pytest.mark.usefixtures("many_files")
def test_floods_silence_garbage_and_replays_change_nothing(spark: Any) -> None:
    programs.run(programs.nothing, 3)  # Spark starts its executors
    subnet = str(spark.sparkContext.getConf().get("spark.driver.host")).rpartition(".")[0]
    flood = Flood(subnet)
    with hosts.capture(subnet) as frames, flood.against(frames):
        found = programs.run(join_again_and_again, 3).per_rank
    assert list(found) == [[6.0 * number for number in range(40) for _ in range(2)]] * 3
    assert flood.counts  # ports are open only while ranks join: some hundred connections
    assert flood.most_told <= _NONCE
