"""``connected``: connects ranks by sockets."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lagom.exchange.sockets.encryption import Connection, EncryptedSocket, encrypted
from lagom.exchange.sockets.handshake import End, HungUp, admit, claimed, introduce

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from lagom.exchange.sockets.encryption import Credentials

_TIMEOUT_S = 60.0
"""Seconds that a rank waits for its next connection with another rank, once all are known to be alive."""
_CLAIM_S = 30.0
"""Seconds that a rank waits inside an encrypted connection to hear which rank is at the other end."""
_PAUSE_MS = 20, 100
"""Shortest and longest pause before the next try."""


class GatherTexts(Protocol):
    """All-gather of texts, with which ranks set up faster exchanges."""

    def __call__(self, data: bytes, wanted: Collection[int] | None = None) -> list[bytes]:
        """Return each rank's text, in rank order; with ``wanted``, only the texts of these ranks can be relied on.

        It is a collective. Either all ranks pass ``wanted``, or none does. With ``wanted`` a rank waits only for these
        ranks, whose texts must not be empty.
        """


def connected(
    rank: int,
    partners: Collection[int] | None,
    homes: Sequence[object],
    ip: str,
    all_gather: GatherTexts,
    credentials: Credentials,
    purpose: str,
) -> list[Connection | None]:
    """Return a list with the connection to each partner at the partner's rank, and None elsewhere; a collective.

    Args:
        partners: ranks to connect with, which must have this rank among their partners; None for all other ranks.
        homes: the host of each rank; equal for ranks that can reach each other's Unix sockets.
        ip: address at which other hosts reach this one.
        all_gather: gathers a text of every rank, here the address at which the rank listens. The text is not secret.
        credentials: key and certificates that the run's ranks share.
        purpose: the purpose of the connections, of which both ends assure themselves.

    Raises:
        Misdirected: when a connection does not end where it should.
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
        # With the listener's address the purpose is different for each call.
        end = End(rank, f"{purpose} at {mine}", homes)
        rows = all_gather(mine.encode(), wanted=None if partners is None else lower)
        for peer in lower:
            name, where = json.loads(rows[peer])
            place = bytes.fromhex(name) if homes[peer] == homes[rank] else (str(where[0]), int(where[1]))
            there = end._replace(purpose=f"{purpose} at {rows[peer].decode()}")
            peers[peer] = reach(place, there, peer, credentials, _TIMEOUT_S)
        for peer, found in accepted(listeners, others[len(lower) :], end, credentials, _TIMEOUT_S):
            peers[peer] = found
    for peer, connection in enumerate(peers):
        if connection is not None and connection.family != socket.AF_UNIX:
            _remote[connection] = peer
    return peers


_remote: weakref.WeakKeyDictionary[Connection, int] = weakref.WeakKeyDictionary()


def remote_connections() -> list[tuple[int, Connection]]:
    """Return this rank's open connections with ranks of other hosts, each with the number of that rank."""
    return [(peer, connection) for connection, peer in list(_remote.items()) if connection.fileno() >= 0]


def accepted(
    listeners: Sequence[socket.socket], awaited: Collection[int], end: End, credentials: Credentials, timeout_s: float
) -> Iterator[tuple[int, Connection]]:
    """Yield each of the ``awaited`` ranks with its connection, in the order in which they connect.

    Raises:
        TimeoutError: when no rank has come for ``timeout_s``.
    """
    left = set(awaited)
    for peer, found in admit(listeners, credentials.key, end, timeout_s) if left else ():
        if found.family != socket.AF_UNIX:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = _proven(encrypted(found, credentials, accepts=True), end, peer, listens=True)
        except OSError:  # a man in the middle, or a rank that has ended; a living rank at the other end raises an error
            found.close()
            continue
        left.discard(peer)
        yield peer, connection
        if not left:
            return


def reach(
    place: bytes | tuple[str, int],
    end: End,
    peer: int,
    credentials: Credentials,
    timeout_s: float,
    *,
    waits: bool = False,
) -> Connection:
    """Connect with rank ``peer``, which listens at ``place``, the name of a Unix socket or an address.

    Try again if the listener hangs up: while many strangers connect, it closes the oldest connections without a proof.

    Args:
        waits: try again also if nothing listens at ``place`` yet.

    Raises:
        Misdirected: when another rank of this run has answered.
        OSError: when the rank cannot be reached, or the listener is not a rank of this run.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.01, deadline - time.monotonic())
        again: tuple[type[OSError], ...] = (HungUp, ConnectionResetError, BrokenPipeError)
        connection: socket.socket | None = None
        try:
            connection = _dialled(place, left_s)
            introduce(connection, credentials.key, end, peer, left_s)
            return _proven(encrypted(connection, credentials, accepts=False), end, peer, listens=False)
        except OSError as error:
            if connection is not None:
                connection.close()
            refused = waits and isinstance(error, ConnectionRefusedError)
            if not (refused or isinstance(error, again)) or time.monotonic() >= deadline:
                raise
        shortest, longest = _PAUSE_MS
        time.sleep((shortest + secrets.randbelow(longest - shortest)) / 1e3)


def _proven(connection: Connection, end: End, peer: int, *, listens: bool) -> Connection:
    """Check inside an encrypted connection that its other end is that of the proofs; return ``connection``.

    All ranks have the same certificate, so TLS alone does not say which rank is at the other end.

    Raises:
        Misdirected: when it is another rank's.
        OSError: when the other end does not answer.
    """
    if isinstance(connection, EncryptedSocket):
        connection.settimeout(_CLAIM_S)
        connection.sendall(end.claim(peer, listens=listens))
        try:
            end.check(claimed(connection), peer, listens=listens)
        except OSError:
            connection.close()
            raise
        connection.settimeout(None)
    return connection


def host_identity() -> bytes:
    """Return a text that is equal in two processes of one user if abstract Unix sockets can connect them.

    Abstract names belong to a network namespace.
    """
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
        connection = socket.create_connection(place, timeout=timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection
