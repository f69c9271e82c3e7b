"""``introduce`` and ``admit``: prove on a new connection between two ranks that both know the run's key."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NONCE = 16
_PROOF = 32
_RANK = struct.Struct("<I")
_HELLO = _RANK.size + _NONCE + _PROOF
HELLO_S = 5.0
"""Seconds in which a connection must prove itself."""
MAX_STRANGERS = 256
"""Most connections without a proof at the same time; if there are more, the oldest are closed."""


class Stranger(ConnectionError):
    """The other end is not a rank of this run."""


class HungUp(Stranger):
    """The other end has closed the connection before its proof."""


def introduce(connection: socket.socket, key: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Prove to the listener that this is ``rank``, check the listener's proof, and return ``connection``.

    Raises:
        Stranger: when the listener is another user's process, has a wrong proof, or hangs up (``HungUp``).
        OSError: when the listener takes longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    if connection.family == socket.AF_UNIX and not is_own(connection):
        raise Stranger("another user's process listens where a rank should")
    nonces = _exactly(connection, _NONCE, deadline) + secrets.token_bytes(_NONCE)
    number = _RANK.pack(rank)
    connection.sendall(number + nonces[_NONCE:] + _proof(key, b"who connects", number, nonces))
    if not hmac.compare_digest(_exactly(connection, _PROOF, deadline), _proof(key, b"who listens", number, nonces)):
        raise Stranger("what listens there is no rank of this run")
    connection.settimeout(timeout_s)
    return connection


def admit(listeners: Sequence[socket.socket], key: bytes, timeout_s: float) -> Iterator[tuple[int, socket.socket]]:
    """Yield each rank that connects and proves itself, with its connection, which does not block.

    Strangers do not delay ranks: their proofs are awaited at the same time, each for ``HELLO_S``.

    Raises:
        TimeoutError: when no rank has proved itself for ``timeout_s``.
    """
    strangers: dict[int, _Stranger] = {}
    by_number = {listener.fileno(): listener for listener in listeners}
    poll = select.poll()  # ``select`` does not take descriptors above 1023
    for listener in listeners:
        listener.setblocking(False)
        poll.register(listener, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(1e3 * min([left, *(one.left_s() for one in strangers.values())])):
                if number in by_number:
                    if (stranger := _accepted(by_number[number], key)) is not None:
                        strangers[stranger.connection.fileno()] = stranger
                        poll.register(stranger.connection, select.POLLIN)
                elif strangers[number].hears():
                    known = strangers.pop(number)
                    poll.unregister(number)
                    yield known.rank, known.connection
                    deadline = time.monotonic() + timeout_s
            for number in _gone(strangers):
                poll.unregister(number)
                strangers.pop(number).connection.close()
        raise TimeoutError(f"another rank did not connect within {timeout_s:.0f} s")
    finally:
        for stranger in strangers.values():
            stranger.connection.close()


def is_own(peer: socket.socket) -> bool:
    """Return whether, according to the kernel, the process at the other end of a Unix socket runs as this user."""
    _, uid, _ = _credentials(peer)
    return uid == os.geteuid()


def process_of(peer: socket.socket) -> int:
    """Return the pid of the process at the other end of a Unix socket, according to the kernel."""
    pid, _, _ = _credentials(peer)
    return pid


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _accepted(listener: socket.socket, key: bytes) -> _Stranger | None:
    try:
        connection, _ = listener.accept()
    except OSError:  # the peer has hung up already, or this process can open no more files
        time.sleep(0.01)
        return None
    if connection.family == socket.AF_UNIX and not is_own(connection):
        connection.close()
        return None
    return _Stranger(connection, key)


def _gone(strangers: dict[int, _Stranger]) -> list[int]:
    """Return the strangers to close: hung up, wrong proof, out of time, or the oldest if there are too many."""
    gone = [number for number, one in strangers.items() if one.is_refused or one.left_s() <= 0]
    return gone + [number for number in strangers if number not in gone][: max(0, len(strangers) - MAX_STRANGERS)]


class _Stranger:
    """A connection that has not proved itself."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection = connection
        self.is_refused = False
        self.rank = -1
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self._hello = b""
        self._deadline = time.monotonic() + HELLO_S
        connection.setblocking(False)
        self._send(self._nonce)

    def left_s(self) -> float:
        """Return the seconds left for the proof."""
        return max(0.0, self._deadline - time.monotonic())

    def hears(self) -> bool:
        """Read the bytes that have arrived; return whether the proof of a rank is complete and right."""
        try:
            data = self.connection.recv(_HELLO - len(self._hello))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._hello += data
        self.is_refused = not data
        if len(self._hello) < _HELLO:
            return False
        number, nonce = self._hello[: _RANK.size], self._hello[_RANK.size : -_PROOF]
        nonces = self._nonce + nonce
        if not hmac.compare_digest(self._hello[-_PROOF:], _proof(self._key, b"who connects", number, nonces)):
            self.is_refused = True
            return False
        (self.rank,) = _RANK.unpack(number)
        self._send(_proof(self._key, b"who listens", number, nonces))
        return not self.is_refused

    def _send(self, data: bytes) -> None:
        try:
            self.is_refused = self.connection.send(data, socket.MSG_NOSIGNAL) < len(data)
        except OSError:
            self.is_refused = True


def _proof(key: bytes, who: bytes, rank: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"lagom ranks 1: " + who + rank + nonces, "sha256")


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:  # one deadline for all bytes, so that a peer that sends them slowly gains no time
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise HungUp("what listens there hung up")
        data += part
    return data


# Note [Proofs of ranks]
#
# The handshake is like that of Note [Handshake] in wire/framing.py: the listener sends a nonce; the other end sends its
# rank number, a nonce and a proof; the listener sends its proof. The listener reads 52 bytes from a stranger, in any
# number of pieces, and compares the proof in constant time before it uses the rank number. On a Unix socket the kernel
# also says which user runs the process at the other end; the connection of another user is closed at once. Between
# hosts, later messages are encrypted if Spark's encryption is set, unless ``allow_unencrypted_collectives`` is True
# (Note [Encryption between hosts] in encryption.py). All other later messages are neither encrypted nor authenticated.
