"""Hosts as those of ``hosts.py``, on a network of a given rate, delay and loss. Kernels need ``tun`` for it, not netem.

A process of its own is the switch: it reads each host's packets from a TAP device, and writes them to the device of the
host that they are for, when their time has come.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass

from tests.integration.hosts import Host, entered, ip, quiet, subnet

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TAP_WITH_OFFLOAD_HEADER = 0x5002
_HEADER = 10
"""Bytes before a packet, in which the kernel says how it is to be cut."""
_LARGE_PACKETS = 7
"""Checksums and TCP's segments are left to the device, which is another kernel's here."""
_PR_SET_TIMERSLACK = 29
_QUEUE_BYTES = 4 << 20
"""Bytes that wait for a link; further packets are lost."""


@dataclass(frozen=True)
class Link:
    """How each host is connected with the switch."""

    mbit: float = 0.0
    """Megabits in a second that a host can send; 0 is no limit."""
    delay_ms: float = 0.0
    """From a host that sends to the one that receives."""
    loss: float = 0.0
    """Share of packets that are lost. Without loss, up to 64 KB of TCP's pass as one packet, which costs less."""


@contextmanager
def slow_network(count: int, link: Link) -> Iterator[tuple[str, list[Host]]]:
    """``count`` hosts on such a network; gives this machine's own address there, and the hosts."""
    with ExitStack() as stack:
        number = stack.enter_context(subnet())
        names = [f"lg{number}s", *(f"lg{number}t{host}" for host in range(count))]
        command = [sys.executable, "-m", "tests.integration.slow_network", json.dumps([names, *astuple(link)])]
        switch = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(switch.kill)
        assert switch.stdout is not None
        assert switch.stdout.readline() == b"ready\n"
        ip(f"link set {names[0]} master lgb{number} up")
        hosts = []
        for host, tap in enumerate(names[1:]):
            name = f"lgh{number}n{host}"
            quiet("ip", "netns", "del", name)
            ip(f"netns add {name}")
            stack.callback(quiet, "ip", "netns", "del", name)
            ip(f"link set {tap} netns {name} name eth0")
            hosts.append(stack.enter_context(entered(name, f"10.213.{number}.{10 + host}", f"-n {name} link set eth0")))
        yield f"10.213.{number}.1", hosts


def switch(names: Sequence[str], mbit: float, delay_ms: float, loss: float) -> None:
    """Make the devices ``names``, and pass packets on between them until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    ports = [_tap(name, 0 if loss else _LARGE_PACKETS) for name in names]
    print("ready", flush=True)
    by_address: dict[bytes, int] = {}
    free_at = dict.fromkeys(ports, 0.0)
    waiting: list[tuple[float, int, int, bytes]] = []
    """Packets by the time at which they arrive: time, a number, the sender's port, the packet."""
    numbers, random_loss = itertools.count(), random.Random(0)
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ports, 0], [], [], left_s)
        if 0 in ready:
            return
        now = time.monotonic()
        for port in ready:
            for packet in _packets(port):
                by_address[packet[_HEADER + 6 : _HEADER + 12]] = port
                begins = max(now, free_at[port])
                if random_loss.random() < loss or (mbit and (begins - now) * mbit * 1e6 / 8 > _QUEUE_BYTES):
                    continue
                free_at[port] = begins + (8e-6 * len(packet) / mbit if mbit else 0.0)
                heapq.heappush(waiting, (free_at[port] + delay_ms / 1e3, next(numbers), port, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, sender, packet = heapq.heappop(waiting)
            known = by_address.get(packet[_HEADER : _HEADER + 6])
            for port in ports if known is None else [known]:
                if port != sender:
                    _write(port, packet)


def _packets(port: int) -> Iterator[bytes]:
    with suppress(OSError):  # there are no more, or the device is down
        for _ in range(64):
            yield os.read(port, 1 << 17)


def _write(port: int, packet: bytes) -> None:
    with suppress(OSError):  # the device is down, or its queue is full
        os.write(port, packet)


def _tap(name: str, offload: int) -> int:
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITH_OFFLOAD_HEADER))
    fcntl.ioctl(port, _TUNSETOFFLOAD, offload)
    return port


if __name__ == "__main__":
    switch(*json.loads(sys.argv[1]))
