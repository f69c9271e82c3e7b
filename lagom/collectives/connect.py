"""``connect_mesh``: connects every rank of a mesh with every other."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lagom.collectives.handshake import admit, introduce
from lagom.collectives.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TIMEOUT_S = 60.0
"""Limit to connect, once all ranks are known to be there."""


def connect_mesh(
    rank: int, world_size: int, ip: str, all_gather: Callable[[bytes], list[bytes]], key: bytes, timeout_s: float
) -> Mesh:
    """Return a mesh of all ranks; a collective.

    Args:
        ip: address at which other hosts reach this one.
        all_gather: an exchange that works already; whoever reads its messages learns where ranks listen.
        key: secret of the run's ranks.
        timeout_s: how long the mesh will wait for a rank.

    Raises:
        OSError: when a rank cannot be reached.
    """
    homes = all_gather(host_identity())
    peers: list[socket.socket | None] = [None] * world_size
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(socket.AF_UNIX, ""))]
        address: list[object] = []
        if len(set(homes)) > 1:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            listeners.append(stack.enter_context(listen(family, (ip, 0))))
            address = list(listeners[1].getsockname()[:2])
        mine = json.dumps([listeners[0].getsockname().hex(), address])
        for peer, row in enumerate(all_gather(mine.encode())[:rank]):
            name, address = json.loads(row)
            connection = _connection(bytes.fromhex(name) if homes[peer] == homes[rank] else None, address)
            peers[peer] = introduce(connection, key, rank, _TIMEOUT_S)
        for peer, found in admit(listeners, key, _TIMEOUT_S) if rank < world_size - 1 else ():
            if found.family != socket.AF_UNIX:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[peer] = found
            if all(peers[other] is not None for other in range(rank + 1, world_size)):
                break
    return Mesh(peers, timeout_s)


def host_identity() -> bytes:
    """Return a text equal in processes that a Unix socket can connect; abstract names belong to a network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.geteuid()}".encode()


def listen(family: int, address: str | tuple[str, int]) -> socket.socket:
    """Return a socket that listens at ``address``."""
    found = socket.socket(family, socket.SOCK_STREAM)
    found.bind(address)  # the kernel chooses an abstract name for ""
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
