"""``connected``: connects ranks by sockets."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lagom.collectives.sockets.encryption import encrypted
from lagom.collectives.sockets.handshake import HungUp, admit, introduce

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from lagom.collectives.sockets.encryption import Connection, Credentials

_TIMEOUT_S = 60.0
"""Limit to connect, once all ranks are known to be there."""
_PAUSE_MS = 20, 100
"""Shortest and longest pause before the next try."""


class Gather(Protocol):
    """Exchange of texts among all ranks, by which they set up faster ones."""

    def __call__(self, data: bytes, wanted: Collection[int] | None = None) -> list[bytes]:
        """Return each rank's text, in rank order; with ``wanted`` those of these ranks, and of others any or none.

        All ranks call it, with ``wanted`` or all without. With it a rank waits for these ranks alone, which must give
        more than b"".
        """


def connected(
    rank: int,
    partners: Collection[int] | None,
    homes: Sequence[object],
    ip: str,
    all_gather: Gather,
    credentials: Credentials,
) -> list[Connection | None]:
    """Return connections with ``partners`` at their places, and None at others; a collective of all ranks.

    Args:
        partners: ranks that have this rank among their partners; None if every rank connects with every other one.
        homes: the host of each rank; equal for ranks that can reach each other's Unix sockets.
        ip: address at which other hosts reach this one.
        all_gather: an exchange that works already; whoever reads its messages learns where ranks listen.
        credentials: those of the run's ranks.

    Raises:
        OSError: when a rank cannot be reached.
    """
    peers: list[Connection | None] = [None] * len(homes)
    if partners is not None and not partners:
        all_gather(b"", wanted=())
        return peers
    others = sorted(set(range(len(homes))) - {rank} if partners is None else partners)
    lower = [peer for peer in others if peer < rank]
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(socket.AF_UNIX, ""))]
        address: list[object] = []
        if any(homes[peer] != homes[rank] for peer in others):
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            listeners.append(stack.enter_context(listen(family, (ip, 0))))
            address = list(listeners[1].getsockname()[:2])
        mine = json.dumps([listeners[0].getsockname().hex(), address])
        rows = all_gather(mine.encode(), wanted=None if partners is None else lower)
        for peer in lower:
            name, where = json.loads(rows[peer])
            place = bytes.fromhex(name) if homes[peer] == homes[rank] else (str(where[0]), int(where[1]))
            peers[peer] = reach(place, rank, credentials, _TIMEOUT_S)
        for peer, found in accepted(listeners, others[len(lower) :], credentials, _TIMEOUT_S):
            peers[peer] = found
    return peers


def accepted(
    listeners: Sequence[socket.socket], awaited: Collection[int], credentials: Credentials, timeout_s: float
) -> Iterator[tuple[int, Connection]]:
    """Yield the ``awaited`` ranks with their connections, as they come.

    Raises:
        TimeoutError: when no rank has come for ``timeout_s``.
    """
    left = set(awaited)
    for peer, found in admit(listeners, credentials.key, timeout_s) if left else ():
        if found.family != socket.AF_UNIX:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = encrypted(found, credentials, accepts=True)
        except OSError:  # somebody on the way, or a rank that is gone again; a rank that lives ends with an error
            found.close()
            continue
        left.discard(peer)
        yield peer, connection
        if not left:
            return


def reach(
    place: bytes | tuple[str, int], rank: int, credentials: Credentials, timeout_s: float, *, waits: bool = False
) -> Connection:
    """Connect with the rank that listens at ``place``, the name of a Unix socket or an address.

    A rank that is flooded by strangers hangs up on some that were about to prove themselves: they try again.

    Args:
        waits: try again also where nothing listens.

    Raises:
        OSError: when the rank cannot be reached, or what listens there is none of this run.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.01, deadline - time.monotonic())
        again: tuple[type[OSError], ...] = (HungUp, ConnectionResetError, BrokenPipeError)
        found: socket.socket | None = None
        try:
            found = _dialled(place, left_s)
            return encrypted(introduce(found, credentials.key, rank, left_s), credentials, accepts=False)
        except OSError as error:
            if found is not None:
                found.close()
            refused = waits and isinstance(error, ConnectionRefusedError)
            if not (refused or isinstance(error, again)) or time.monotonic() >= deadline:
                raise
        shortest, longest = _PAUSE_MS
        time.sleep((shortest + secrets.randbelow(longest - shortest)) / 1e3)


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


def _dialled(place: bytes | tuple[str, int], timeout_s: float) -> socket.socket:
    if isinstance(place, tuple):
        found = socket.create_connection(place, timeout=timeout_s)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout_s)
        found.connect(place)
    except OSError:
        found.close()
        raise
    return found
