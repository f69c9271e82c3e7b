"""``ValueServer``: keeps values by name on one rank; each other rank sets and gets them over a connection."""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

from lagom.exchange.sockets.connect import accepted
from lagom.exchange.sockets.handshake import End

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from lagom.exchange.sockets.encryption import Connection, Credentials

REQUEST = struct.Struct("<IBIQ")
"""Number of a request, its operation, and the lengths of the name and the data that follow."""
ANSWER = struct.Struct("<IBQ")
"""Number of the request, kind of the answer, and length of the data that follows."""
NOTHING, VALUE, REFUSAL = range(3)
"""Kinds of answers."""
HELD_S = 20.0
"""Most seconds for which a request for a value that is not set is held, so that clients notice the server's end."""
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 16


class Ask(IntEnum):
    """Kinds of requests that other ranks send to a ``ValueServer``."""

    SET = 1
    GET = 2
    HAS = 3
    """The answer is empty if there is a value."""
    ADD = 4
    """Add a number, written as text, to the value; the answer is the sum."""
    SWAP = 5
    """Replace the value if it equals the expected value; the answer is the value afterwards. See ``swap_data``."""
    DELETE = 6
    COUNT = 7
    """The answer is the number of values, as text."""
    AWAIT = 8
    """The answer is the value once it is set; nothing if it is not set within the seconds given as data."""


_SETTING = frozenset({Ask.SET, Ask.ADD, Ask.SWAP})


def store_purpose(address: Sequence[object]) -> str:
    """Return the purpose of connections with the server that listens at ``address``, as both ends prove it."""
    return f"the run's store at {address[0]} {address[1]}"


class ValueServer:
    """Keeps the values. A thread lets all other ranks connect, stops listening, and only then serves them.

    Args:
        listener: socket at which the other ranks connect; the thread closes it.
        others: numbers of the other ranks.
        timeout_s: how long to wait for the next rank to connect; then the thread serves those that have connected.
    """

    def __init__(
        self, listener: socket.socket, others: Collection[int], credentials: Credentials, timeout_s: float
    ) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._listener = listener
        self._others = others
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._peers: dict[int, _Peer] = {}
        self._poll = select.poll()
        self._held: dict[str, list[_Held]] = {}
        """Requests for values that are not set, by name."""
        self._by_end: list[_Held] = []
        """The requests in ``_held``, as a heap."""
        self._answerable: list[_Held] = []
        self._bell, self._hears_bell = socket.socketpair()
        """Wakes the thread when this rank itself has set a value for which others wait."""
        for one in (self._bell, self._hears_bell):
            one.setblocking(False)
        _all.add(self)
        threading.Thread(target=self._run, name="lagom-store", daemon=True).start()

    def ask(self, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        """Run a request, and return its answer: as ``Ask`` says, else the value before the request; None without one.

        Raises:
            ValueError: when a number is to be added to a value that is not a number.
        """
        with self._changed:
            if what == Ask.AWAIT:
                self._changed.wait_for(lambda: name in self._values, float(data))
            stored = self._values.get(name)
            if what == Ask.SET:
                self._values[name] = data
            elif what == Ask.ADD:
                try:
                    stored = self._values[name] = str(int(stored or b"0") + int(data)).encode()
                except ValueError:
                    raise ValueError(f"the value of {name!r} is no number to which one can be added") from None
            elif what == Ask.SWAP:
                (size,) = _LENGTH.unpack_from(data)
                expected = data[_LENGTH.size : _LENGTH.size + size]
                if (stored or b"") == expected:
                    self._values[name] = data[_LENGTH.size + size :]
                stored = self._values.get(name, expected)
            elif what == Ask.DELETE:
                self._values.pop(name, None)
            elif what == Ask.COUNT:
                stored = str(len(self._values)).encode()
            if what in _SETTING and name in self._values:
                self._changed.notify_all()
                self._release(name)
        return b"" if what == Ask.HAS and stored is not None else stored

    def close(self) -> None:
        """Close the connections."""
        self._listener.close()
        for peer in list(self._peers.values()):
            peer.connection.close()
        self._bell.close()

    def _release(self, name: str) -> None:
        """Let the thread answer the requests that wait for ``name``, which is set now."""
        if waiting := self._held.pop(name, None):
            for one in waiting:
                one.value = self._values[name]
            self._answerable += waiting
            with contextlib.suppress(OSError):  # the bell's buffer is full, or the server is closed
                self._bell.send(b"!", socket.MSG_NOSIGNAL)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a rank does not connect in time, or ``close`` was called
            end = End(0, store_purpose(self._listener.getsockname()))
            for _, connection in accepted([self._listener], self._others, end, self._credentials, self._timeout_s):
                connection.setblocking(False)
                self._peers[connection.fileno()] = _Peer(connection)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the process that opened the socket for this one has a copy
        self._listener.close()
        self._serve()
        self._hears_bell.close()  # by this thread: if ``close`` closed it, ``poll`` would not wake

    def _serve(self) -> None:
        for number in (self._hears_bell.fileno(), *self._peers):
            self._poll.register(number, select.POLLIN)
        while self._peers:
            events = self._poll.poll(self._pause_ms())
            for peer in [self._peers[number] for number, _ in events if number in self._peers]:
                self._attend(peer, partial(self._hear, peer))
            with contextlib.suppress(BlockingIOError):
                if not self._hears_bell.recv(_PIECE):
                    return  # ``close`` was called
            for one in self._due():
                one.peer.put(one.number, NOTHING if one.value is None else VALUE, one.value or b"")
                one.value = b""  # free the value: the request may stay in ``_by_end`` until its time is over
                self._attend(one.peer, one.peer.send)

    def _attend(self, peer: _Peer, call: Callable[[], None]) -> None:
        """Make a ``call`` for one rank, and then poll for its requests and, if answers are left, for room to send."""
        number = peer.connection.fileno()
        if self._peers.get(number) is not peer:
            return
        try:
            call()
            self._poll.modify(number, select.POLLIN | (select.POLLOUT if peer.outgoing else 0))
        except (OSError, ValueError, struct.error):  # the rank has ended, or has sent bytes that are not a request
            self._poll.unregister(number)
            self._peers.pop(number).connection.close()

    def _hear(self, peer: _Peer) -> None:
        """Answer the requests of a rank, except those that have to wait for a value."""
        for number, what, name, data in peer.requests():
            if what == Ask.AWAIT:
                if self._hold(peer, number, name, min(max(0.0, float(data)), HELD_S)):
                    continue
                what = Ask.GET  # this thread must not wait, even if another thread deletes the value now
            try:
                answer = self.ask(what, name, data)
                peer.put(number, NOTHING if answer is None else VALUE, answer or b"")
            except ValueError as error:
                peer.put(number, REFUSAL, str(error).encode())
        peer.send()

    def _hold(self, peer: _Peer, number: int, name: str, seconds: float) -> bool:
        """Keep a request if its value is not set; return whether it has to wait."""
        with self._changed:
            if name in self._values:
                return False
            one = _Held(time.monotonic() + seconds, name, peer, number)
            self._held.setdefault(name, []).append(one)
            heapq.heappush(self._by_end, one)
        return True

    def _due(self) -> list[_Held]:
        """Return the held requests to answer now: their values are set, or their time is over."""
        with self._changed:
            due, self._answerable = self._answerable, []
            while self._by_end and (self._by_end[0].value is not None or self._by_end[0].end <= time.monotonic()):
                one = heapq.heappop(self._by_end)
                if one.value is None:
                    self._held[one.name].remove(one)
                    if not self._held[one.name]:
                        del self._held[one.name]
                    due.append(one)
        return due

    def _pause_ms(self) -> float | None:
        with self._changed:
            return None if not self._by_end else max(0.0, 1e3 * (self._by_end[0].end - time.monotonic()))


class _Peer:
    """A connected rank, with the bytes received of its next request and the answers not sent yet."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.outgoing = bytearray()
        self._incoming = bytearray()

    def requests(self) -> Iterator[tuple[int, Ask, str, bytes]]:
        """Yield number, operation, name and data of each request that has arrived completely.

        Raises:
            OSError: when the rank has closed the connection.
            ValueError: when the rank has sent bytes that are not a request.
        """
        try:
            while data := self.connection.recv(_PIECE):
                self._incoming += data
            raise ConnectionError("a rank hung up")
        except BlockingIOError:
            pass
        while len(self._incoming) >= REQUEST.size:
            number, what, name_size, size = REQUEST.unpack_from(self._incoming)
            middle = REQUEST.size + name_size
            if len(self._incoming) < middle + size:
                return
            name = self._incoming[REQUEST.size : middle].decode()
            data = bytes(self._incoming[middle : middle + size])
            del self._incoming[: middle + size]
            yield number, Ask(what), name, data

    def put(self, number: int, kind: int, answer: bytes) -> None:
        """Queue an answer, which ``send`` sends."""
        self.outgoing += ANSWER.pack(number, kind, len(answer)) + answer

    def send(self) -> None:
        """Send as much of the queued answers as the kernel accepts without waiting."""
        try:
            while self.outgoing:
                piece = bytes(self.outgoing[:_PIECE])
                del self.outgoing[: self.connection.sendmsg([piece], (), socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass


@dataclass(order=True)
class _Held:
    """A request that waits for a value until the time ``end``."""

    end: float
    name: str = field(compare=False)
    peer: _Peer = field(compare=False)
    number: int = field(compare=False)
    value: bytes | None = field(default=None, compare=False)


def swap_data(expected: bytes, wanted: bytes) -> bytes:
    """Return the data of ``Ask.SWAP``; with an empty ``expected``, a value that is not set is set as well."""
    return _LENGTH.pack(len(expected)) + expected + wanted


_all: weakref.WeakSet[ValueServer] = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_all):
        one.close()
        one._hears_bell.close()


# Close the copies of the connections in a fork: with them, a loader worker that outlives its rank would keep the other
# ranks waiting for that rank.
os.register_at_fork(after_in_child=_close_all)
