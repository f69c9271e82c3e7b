"""``introduce`` and ``admit``: prove on a new connection between two ranks that both know the run's key, and which
ranks they are. See Note [Proofs of ranks].
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lagom.exchange.sockets.encryption import EncryptedSocket

_NONCE = 16
_PROOF = 32
CLAIM = struct.Struct("<II16s")
"""What one end says of a connection: its own rank, the rank that it means at the other end, and ``End.digest``."""
_HELLO = CLAIM.size + _NONCE + _PROOF
_ANSWER = CLAIM.size + _PROOF
HELLO_S = 5.0
"""Seconds in which a connection must prove itself."""
MAX_STRANGERS = 256
"""Most connections without a proof at the same time; if there are more, the oldest are closed."""


class Stranger(ConnectionError):
    """The other end is not a rank of this run."""


class HungUp(Stranger):
    """The other end has closed the connection before its proof."""


class Misdirected(ConnectionError):
    """The other end is a rank of this run, but not the end that this connection was meant for."""


class End(NamedTuple):
    """This rank's end of its connections with other ranks, as it means them."""

    rank: int
    purpose: str
    """The connections' purpose, equal on both ends, and different for any other connection of the same two ranks."""
    hosts: Sequence[object] = ()
    """Host of each rank, equal on all ranks; empty if all ranks share a host, or this end does not know the hosts."""

    def claim(self, peer: int, *, listens: bool) -> bytes:
        """Return what this end says of its connection with rank ``peer``."""
        return CLAIM.pack(self.rank, peer, self.digest(peer, listens=listens))

    def digest(self, peer: int, *, listens: bool) -> bytes:
        """Return 16 bytes that both ends compute, of the purpose and of both hosts."""
        order = (peer, self.rank) if listens else (self.rank, peer)
        hosts = [str(self.hosts[rank]) if rank < len(self.hosts) else "" for rank in order]
        return hashlib.sha256(json.dumps([self.purpose, *hosts]).encode()).digest()[:16]

    def check(self, claim: bytes, peer: int, *, listens: bool) -> None:
        """Compare the ``claim`` of the other end with this end's connection with rank ``peer``.

        Raises:
            Misdirected: when the other end means another connection.
        """
        rank, meant, digest = CLAIM.unpack(claim)
        fault = f"rank {rank} answered"
        if (rank, digest) == (peer, self.digest(peer, listens=listens)):
            if meant == self.rank:
                return
            fault += f", which means rank {meant}"
        elif rank == peer:
            fault += " for another purpose, or from another host"
        what = self.purpose.partition(" at ")[0]
        raise Misdirected(
            f"rank {self.rank} connected with rank {peer} ({what}), and {fault}: something between the hosts exchanges "
            "the connections of ranks; let their ports be neither forwarded nor redirected"
        )


def introduce(connection: socket.socket, key: bytes, end: End, peer: int, timeout_s: float) -> socket.socket:
    """Prove to the listener that this is ``end``, check that the listener is rank ``peer``, and return ``connection``.

    Raises:
        Stranger: when the listener is another user's process, has a wrong proof, or hangs up (``HungUp``).
        Misdirected: when the listener is another rank of this run, or listens for another purpose.
        OSError: when the listener takes longer than ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    if connection.family == socket.AF_UNIX and not is_own(connection):
        raise Stranger("another user's process listens where a rank should")
    nonces = _exactly(connection, _NONCE, deadline) + secrets.token_bytes(_NONCE)
    own = end.claim(peer, listens=False)
    connection.sendall(own + nonces[_NONCE:] + _proof(key, b"who connects", own, nonces))
    answer = _exactly(connection, _ANSWER, deadline)
    claim, proof = answer[: CLAIM.size], answer[CLAIM.size :]
    if not hmac.compare_digest(proof, _proof(key, b"who listens", own + claim, nonces)):
        raise Stranger("what listens there is no rank of this run")
    end.check(claim, peer, listens=False)
    connection.settimeout(timeout_s)
    return connection


def admit(
    listeners: Sequence[socket.socket], key: bytes, end: End, timeout_s: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yield each rank that connects and proves itself, with its connection, which does not block.

    Strangers do not delay ranks: their proofs are awaited at the same time, each for ``HELLO_S``. A rank that means
    another end than ``end`` is told so, and closed.

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
                    if (stranger := _accepted(by_number[number], key, end)) is not None:
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


def claimed(connection: EncryptedSocket) -> bytes:
    """Return the claim that the other end has sent inside an encrypted connection.

    Raises:
        OSError: when it hangs up, or does not send in time.
    """
    data = bytearray(CLAIM.size)
    if connection.recv_into(memoryview(data), 0, socket.MSG_WAITALL) < CLAIM.size:
        raise HungUp("what listens there hung up")
    return bytes(data)


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


def _accepted(listener: socket.socket, key: bytes, end: End) -> _Stranger | None:
    try:
        connection, _ = listener.accept()
    except OSError:  # the peer has hung up already, or this process can open no more files
        time.sleep(0.01)
        return None
    if connection.family == socket.AF_UNIX and not is_own(connection):
        connection.close()
        return None
    return _Stranger(connection, key, end)


def _gone(strangers: dict[int, _Stranger]) -> list[int]:
    """Return the strangers to close: hung up, wrong proof, out of time, or the oldest if there are too many."""
    gone = [number for number, one in strangers.items() if one.is_refused or one.left_s() <= 0]
    return gone + [number for number in strangers if number not in gone][: max(0, len(strangers) - MAX_STRANGERS)]


class _Stranger:
    """A connection that has not proved itself."""

    def __init__(self, connection: socket.socket, key: bytes, end: End) -> None:
        self.connection = connection
        self.is_refused = False
        self.rank = -1
        self._key = key
        self._end = end
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
        claim, nonce = self._hello[: CLAIM.size], self._hello[CLAIM.size : -_PROOF]
        nonces = self._nonce + nonce
        if not hmac.compare_digest(self._hello[-_PROOF:], _proof(self._key, b"who connects", claim, nonces)):
            self.is_refused = True
            return False
        self.rank = CLAIM.unpack(claim)[0]
        own = self._end.claim(self.rank, listens=True)
        self._send(own + _proof(self._key, b"who listens", claim + own, nonces))
        try:
            self._end.check(claim, self.rank, listens=True)
        except Misdirected:  # the answer has told the rank, which raises an error
            self.is_refused = True
        return not self.is_refused

    def _send(self, data: bytes) -> None:
        try:
            self.is_refused = self.connection.send(data, socket.MSG_NOSIGNAL) < len(data)
        except OSError:
            self.is_refused = True


def _proof(key: bytes, who: bytes, claims: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"lagom ranks 2: " + who + claims + nonces, "sha256")


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
# The handshake is like that of Note [Handshake] in wire/framing.py: the listener sends a nonce; the other end sends
# its claim, a nonce and a proof; the listener sends its own claim and proof. A claim has the sender's rank, the rank
# that it means at the other end, and a digest of the purpose and of the hosts of both; the proofs cover both claims.
# So where somebody between the hosts exchanges connections, the listener refuses the rank that did not mean it, and
# its claim tells that rank who has answered. The listener reads 72 bytes from a stranger, in any number of pieces,
# and compares the proof in constant time before it uses the claim. On a Unix socket the kernel also says which user
# runs the process at the other end; the connection of another user is closed at once. Between hosts, later messages
# are encrypted if Spark's encryption is set, unless ``allow_unencrypted_collectives`` is True (Note [Encryption
# between hosts] in encryption.py). All other later messages are neither encrypted nor authenticated.
