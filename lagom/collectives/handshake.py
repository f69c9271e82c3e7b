"""``introduce`` and ``admit``: a connection between two ranks begins with proofs that both know the run's key."""

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
_HELLO_S = 5.0
"""How long a connection has to prove itself."""
_STRANGERS = 256
"""Connections that have not, at the same time: of more, the oldest is hung up on."""


class Stranger(ConnectionError):
    """The other end is no rank of this run."""


def introduce(connection: socket.socket, key: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Prove to who listens that this is ``rank``, and have it prove itself; gives ``connection``.

    Raises:
        Stranger: when it does not.
        OSError: when it hangs up, or takes longer than ``timeout_s``.
    """
    connection.settimeout(timeout_s)
    if connection.family == socket.AF_UNIX and not is_own(connection):
        raise Stranger("another user's process listens where a rank should")
    nonces = _exactly(connection, _NONCE) + secrets.token_bytes(_NONCE)
    number = _RANK.pack(rank)
    connection.sendall(number + nonces[_NONCE:] + _proof(key, b"who connects", number, nonces))
    if not hmac.compare_digest(_exactly(connection, _PROOF), _proof(key, b"who listens", number, nonces)):
        raise Stranger("what listens there is no rank of this run")
    return connection


def admit(listeners: Sequence[socket.socket], key: bytes, timeout_s: float) -> Iterator[tuple[int, socket.socket]]:
    """Ranks that connect and prove themselves, as they come; strangers cost 5 s each, all at once.

    Raises:
        TimeoutError: when no rank has come for ``timeout_s``.
    """
    strangers: dict[int, _Stranger] = {}
    by_number = {listener.fileno(): listener for listener in listeners}
    poll = select.poll()  # select has no numbers above 1023
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
    """Whether the process at the other end of a Unix socket is this user's, by the kernel's word."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _accepted(listener: socket.socket, key: bytes) -> _Stranger | None:
    try:
        connection, _ = listener.accept()
    except OSError:  # gone again, or this process can open no more files
        time.sleep(0.01)
        return None
    if connection.family == socket.AF_UNIX and not is_own(connection):
        connection.close()
        return None
    return _Stranger(connection, key)


def _gone(strangers: dict[int, _Stranger]) -> list[int]:
    """Those who hung up, said something wrong, or said nothing for too long; and of too many the oldest."""
    gone = [number for number, one in strangers.items() if one.is_refused or one.left_s() <= 0]
    return gone + [number for number in strangers if number not in gone][: max(0, len(strangers) - _STRANGERS)]


class _Stranger:
    """A connection that has not proved itself."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection = connection
        self.is_refused = False
        self.rank = -1
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self._hello = b""
        self._deadline = time.monotonic() + _HELLO_S
        connection.setblocking(False)
        self._send(self._nonce)

    def left_s(self) -> float:
        """How long it still has."""
        return max(0.0, self._deadline - time.monotonic())

    def hears(self) -> bool:
        """Read what has come; whether that is the whole proof of a rank."""
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


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise Stranger("what listens there hung up")
        data += part
    return data


# Note [Proofs of ranks]
#
# As in Note [Handshake] of wire/framing.py: who listens gives a nonce, who connects its number, a nonce and a proof,
# who listens a proof. Of a stranger 52 bytes are read and compared in constant time, in any number of pieces, and
# nothing of them is parsed before. On a Unix socket the kernel says besides whose process is at the other end: another
# user's is hung up on at once. Between hosts what follows is in clear and has no seals; see docs/security.md.
