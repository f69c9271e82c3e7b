"""``Mesh``: a rank's connections with all other ranks, or with some of them, for exchanges of messages."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING

from lagom.exchange.sockets.encryption import EncryptedSocket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagom.exchange.sockets.encryption import Connection

_LENGTH = struct.Struct("<Q")


class Mesh:
    """Sends and receives messages in the calling thread. See Note [Small messages].

    Args:
        peers: connected stream sockets in rank order; None for this rank, and for ranks that no exchange needs.
        timeout_s: how long to wait for another rank.
    """

    def __init__(self, peers: Sequence[Connection | None], timeout_s: float) -> None:
        self.peers = list(peers)
        self._rows = [bytearray() for _ in peers]
        self._turn = threading.Lock()
        self._num = 0
        self._size = 0
        self._awaited: list[int] = []
        self._waited_ns = [0] * len(self.peers)
        for peer in self.peers:
            if peer is not None:
                peer.setblocking(True)
                if isinstance(peer, EncryptedSocket):
                    peer.settimeout(timeout_s)
                else:  # a timeout in the kernel: Python's timeout takes another system call for each receive
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(timeout_s), 0))
        _all.add(self)

    def exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return each rank's message, ``head`` and ``body`` in one, in rank order; lengths may differ.

        Views are valid until the next call. This rank's own entry is its ``head`` alone.

        Raises:
            OSError: when another rank is gone or did not answer in time.
        """
        size = len(head) + (0 if body is None else len(body))
        parts: list[bytes | memoryview] = [_LENGTH.pack(size), head, *([] if body is None else [body])]
        return self._with_all([parts] * len(self.peers), size, head)

    def deal(self, bodies: Sequence[memoryview]) -> list[memoryview]:
        """Send ``bodies[i]`` to rank i, and return each rank's message to this rank; lengths may differ.

        This rank's own entry is empty. Views and errors are as in ``exchange``.
        """
        return self._with_all([_parts(body) for body in bodies], sum(map(len, bodies)), b"")

    def swap(self, messages: Mapping[int, bytearray], senders: Sequence[int]) -> list[memoryview]:
        """Send each of ``messages``, keyed by its receiver, and return the messages of ``senders``, in their order.

        Views and errors are as in ``exchange``.
        """
        with self._turn:
            return self._swap({peer: _parts(memoryview(one)) for peer, one in messages.items()}, senders)

    def waited(self) -> list[int]:
        """Return the nanoseconds that this rank has waited for each other rank. Any thread may call this."""
        return list(self._waited_ns)

    def standing(self) -> tuple[str, int, list[int]]:
        """Return the exchange in which this rank waits, the exchange's number, and the ranks that have not joined it.

        The text is empty when this rank does not wait. Any thread may call this at any time.
        """
        if not (awaited := self._awaited):
            return "", 0, []
        current, *later = awaited
        fds = {number: peer.fileno() for number in later if (peer := self.peers[number]) is not None}
        poll = select.poll()
        for fd in fds.values():
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        there = {fd for fd, _ in poll.poll(0)}
        missing = [current, *(number for number, fd in fds.items() if fd not in there)]
        return f"exchange of {self._size} bytes", self._num, missing

    def _with_all(self, parts: Sequence[Sequence[bytes | memoryview]], size: int, own: bytes) -> list[memoryview]:
        others = [number for number, peer in enumerate(self.peers) if peer is not None]
        with self._turn:
            self._num, self._size = self._num + 1, size
            rows = iter(self._swap({number: parts[number] for number in others}, others))
        return [memoryview(own) if peer is None else next(rows) for peer in self.peers]

    def _swap(self, messages: Mapping[int, Sequence[bytes | memoryview]], senders: Sequence[int]) -> list[memoryview]:
        threads = [_send(self._peer(number), parts) for number, parts in messages.items()]
        self._awaited = list(senders)
        received = []
        while self._awaited:
            number = self._awaited[0]
            start = time.monotonic_ns()
            received.append(self._receive(number, self._peer(number)))
            self._waited_ns[number] += time.monotonic_ns() - start
            self._awaited = self._awaited[1:]
        for thread in threads:
            if thread is not None:
                thread.join()
        return received

    def _peer(self, number: int) -> Connection:
        found = self.peers[number]
        assert found is not None
        return found

    def close(self) -> None:
        """Close the connections."""
        for peer in self.peers:
            if peer is not None:
                peer.close()

    def _receive(self, number: int, peer: Connection) -> memoryview:
        length = bytearray(_LENGTH.size)
        _fill(peer, memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if len(self._rows[number]) < size:
            self._rows[number] = bytearray(size)
        view = memoryview(self._rows[number])[:size]
        _fill(peer, view)
        return view


def _parts(message: memoryview) -> list[bytes | memoryview]:
    return [_LENGTH.pack(len(message)), message]


def _send(peer: Connection, parts: Sequence[bytes | memoryview]) -> threading.Thread | None:
    """Send ``parts`` without waiting. If bytes are left, return a thread that sends them; else return None.

    Bytes are left if the kernel's buffer is full, and after the first 64 KB of an encrypted connection. A blocking send
    could deadlock, since the peer may be sending as well.
    """
    try:
        count = peer.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        count = 0
    if count == sum(map(len, parts)):
        return None
    sender = threading.Thread(target=_send_rest, args=(peer, b"".join(parts)[count:]), name="lagom-mesh", daemon=True)
    sender.start()
    return sender


def _send_rest(peer: Connection, rest: bytes) -> None:
    # The receive from a peer that has ended raises the error.
    with contextlib.suppress(OSError):
        peer.sendall(rest)


def _fill(peer: Connection, view: memoryview) -> None:
    while len(view):
        try:
            count = peer.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("another rank did not answer in time") from error
        if count == 0:
            raise ConnectionError("another rank hung up")
        view = view[count:]


_all: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_all() -> None:
    for mesh in list(_all):
        mesh.close()


# Close the copies of the connections in a fork: with them, a loader worker that outlives its rank would keep the other
# ranks waiting for that rank.
os.register_at_fork(after_in_child=_close_all)


# Note [Small messages]
#
# Most exchanges are small: gradients of a small model, statistics of a BatchNorm layer, signatures. Most of their time
# goes into waking threads. A collective of gloo passes the work to a thread of gloo, which sends to another thread on
# the other side, in two hops or more. Here the calling thread writes to its peers' sockets and reads from them; as a
# rule it sleeps at most once for each peer. Messages may differ in length, so that a rank whose message differs from
# the others' is not an error of the exchange: the caller compares messages.
#
# A connection is a Unix socket between processes of one host, and TCP or TLS between hosts.
