"""``connected``: connects ranks by sockets."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lagom.collectives.sockets.handshake import admit, introduce

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_TIMEOUT_S = 60.0
"""Limit to connect, once all ranks are known to be there."""


def connected(
    rank: int,
    partners: Collection[int],
    homes: Sequence[bytes],
    ip: str,
    all_gather: Callable[[bytes], list[bytes]],
    key: bytes,
) -> list[socket.socket | None]:
    """Return connections with ``partners`` at their places, and None at others; a collective of all ranks.

    Args:
        partners: ranks that have this rank among their partners.
        homes: ``host_identity`` of each rank.
        ip: address at which other hosts reach this one.
        all_gather: an exchange that works already; whoever reads its messages learns where ranks listen.
        key: secret of the run's ranks.

    Raises:
        OSError: when a rank cannot be reached.
    """
    peers: list[socket.socket | None] = [None] * len(homes)
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(socket.AF_UNIX, ""))]
        address: list[object] = []
        if any(homes[peer] != homes[rank] for peer in partners):
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            listeners.append(stack.enter_context(listen(family, (ip, 0))))
            address = list(listeners[1].getsockname()[:2])
        mine = json.dumps([listeners[0].getsockname().hex(), address])
        rows = all_gather(mine.encode())
        for peer in sorted(peer for peer in partners if peer < rank):
            name, address = json.loads(rows[peer])
            connection = _connection(bytes.fromhex(name) if homes[peer] == homes[rank] else None, address)
            peers[peer] = introduce(connection, key, rank, _TIMEOUT_S)
        awaited = {peer for peer in partners if peer > rank}
        for peer, found in admit(listeners, key, _TIMEOUT_S) if awaited else ():
            if found.family != socket.AF_UNIX:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[peer] = found
            awaited.discard(peer)
            if not awaited:
                break
    return peers


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
