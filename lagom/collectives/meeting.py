"""``connected``: how the ranks of a mesh find each other."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lagom.collectives.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HELLO = struct.Struct("<I16s")
_TIMEOUT_S = 60.0
"""To connect, once all ranks are known to be there."""


def connected(
    rank: int, world_size: int, ip: str, all_gather: Callable[[bytes], list[bytes]], timeout_s: float
) -> Mesh:
    """The mesh of all ranks, all of whom call this.

    Args:
        ip: where other hosts reach this one.
        all_gather: an exchange that works already; who can read it can join.
        timeout_s: how long the mesh will wait for a rank.

    Raises:
        OSError: when a rank cannot be reached.
    """
    homes = all_gather(_home())
    token = secrets.token_bytes(16)
    peers: list[socket.socket | None] = [None] * world_size
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listening(socket.AF_UNIX, ""))]
        address: list[object] = []
        if len(set(homes)) > 1:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            listeners.append(stack.enter_context(_listening(family, (ip, 0))))
            address = list(listeners[1].getsockname()[:2])
        mine = json.dumps([listeners[0].getsockname().hex(), address, token.hex()])
        for peer, row in enumerate(all_gather(mine.encode())):
            if peer < rank:
                name, address, secret = json.loads(row)
                near = homes[peer] == homes[rank]
                peers[peer] = _connection(bytes.fromhex(name) if near else None, address)
                peers[peer].sendall(_HELLO.pack(rank, bytes.fromhex(secret)))  # type: ignore[union-attr]
        while any(peers[peer] is None for peer in range(rank + 1, world_size)):
            peer, found = _accepted(listeners, token)
            peers[peer] = found
    return Mesh(peers, timeout_s)


def _home() -> bytes:
    """Equal for processes that a Unix socket can connect: abstract names belong to a network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}".encode()


def _listening(family: int, address: str | tuple[str, int]) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    found.settimeout(_TIMEOUT_S)
    found.bind(address)  # "" has the kernel choose an abstract name
    found.listen(1024)
    return found


def _connection(name: bytes | None, address: Sequence[object]) -> socket.socket:
    if name is None:
        host, port = address
        found = socket.create_connection((str(host), int(str(port))), timeout=_TIMEOUT_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(_TIMEOUT_S)
    found.connect(name)
    return found


def _accepted(listeners: Sequence[socket.socket], token: bytes) -> tuple[int, socket.socket]:
    """The next rank that knows ``token``; others are hung up on."""
    poll = select.poll()  # select has no numbers above 1023
    by_number = {listener.fileno(): listener for listener in listeners}
    for number in by_number:
        poll.register(number, select.POLLIN)
    while True:
        ready = poll.poll(1e3 * _TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"another rank did not connect within {_TIMEOUT_S:.0f} s")
        found, _ = by_number[ready[0][0]].accept()
        found.settimeout(_TIMEOUT_S)
        hello = found.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) == _HELLO.size and hmac.compare_digest(_HELLO.unpack(hello)[1], token):
            if found.family != socket.AF_UNIX:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _HELLO.unpack(hello)[0], found
        found.close()
