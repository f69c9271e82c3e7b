"""``ValueServer``: values by name, which one rank keeps and others set and get over connections of their own."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING

from lagom.collectives.sockets.connect import accepted, reach

if TYPE_CHECKING:
    from collections.abc import Collection

    from lagom.collectives.sockets.encryption import Connection, Credentials

_REQUEST = struct.Struct("<BIQ")
"""Operation, and the lengths of the name and the data that follow."""
_ANSWER = struct.Struct("<BQ")
"""Kind of what follows, and its length."""
_NOTHING, _VALUE, _REFUSAL = range(3)
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 16


class Ask(IntEnum):
    """Kinds of requests that other ranks send to a ``ValueServer``."""

    SET = 1
    GET = 2
    HAS = 3
    ADD = 4
    """Add a number, written as text, to the value; the answer is the sum."""
    SWAP = 5
    """Replace the value if it is the expected one; the answer is the value afterwards. See ``swap_data``."""
    DELETE = 6
    COUNT = 7


class ValueServer:
    """Keeps the values. Other ranks are served by a thread, once all of them have come; then nobody else is let in.

    Args:
        listener: socket at which the other ranks connect; it is closed when all have.
        others: these ranks.
        timeout_s: how long to wait for the next one of them.
    """

    def __init__(
        self, listener: socket.socket, others: Collection[int], credentials: Credentials, timeout_s: float
    ) -> None:
        self._values: dict[str, bytes] = {}
        self._turn = threading.Lock()
        self._listener = listener
        self._others = others
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._peers: dict[int, _Peer] = {}
        _all.add(self)
        threading.Thread(target=self._run, name="lagom-store", daemon=True).start()

    def ask(self, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        """Return the answer; None if there is no such value.

        Raises:
            ValueError: when a number is to be added to a value that is none.
        """
        with self._turn:
            found = self._values.get(name)
            if what == Ask.SET:
                self._values[name] = data
            elif what == Ask.ADD:
                try:
                    found = self._values[name] = str(int(found or b"0") + int(data)).encode()
                except ValueError:
                    raise ValueError(f"the value of {name!r} is no number to which one can be added") from None
            elif what == Ask.SWAP:
                (size,) = _LENGTH.unpack_from(data)
                expected = data[_LENGTH.size : _LENGTH.size + size]
                if (found or b"") == expected:
                    self._values[name] = data[_LENGTH.size + size :]
                found = self._values.get(name, expected)
            elif what == Ask.DELETE:
                self._values.pop(name, None)
            elif what == Ask.COUNT:
                found = str(len(self._values)).encode()
        return b"" if what == Ask.HAS and found is not None else found

    def close(self) -> None:
        """Close the connections."""
        self._listener.close()
        for peer in list(self._peers.values()):
            peer.connection.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a rank does not come, or ``close`` was called meanwhile
            for _, connection in accepted([self._listener], self._others, self._credentials, self._timeout_s):
                connection.setblocking(False)
                self._peers[connection.fileno()] = _Peer(connection)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the process that has opened it for this one holds it too
        self._listener.close()
        poll = select.poll()
        for number in self._peers:
            poll.register(number, select.POLLIN)
        while self._peers:
            for number, _ in poll.poll():
                peer = self._peers[number]
                try:
                    peer.serve(self)
                    poll.modify(number, select.POLLIN | (select.POLLOUT if peer.outgoing else 0))
                except (OSError, ValueError, struct.error):  # the rank has ended, or what it asks is no request
                    poll.unregister(number)
                    self._peers.pop(number).connection.close()


class _Peer:
    """Serves one connected rank: reads its requests and keeps the answers that it has not taken yet."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.incoming = bytearray()
        self.outgoing = bytearray()

    def serve(self, server: ValueServer) -> None:
        """Read requests and send answers, as far as that needs no waiting.

        Raises:
            OSError: when the rank has closed the connection.
            ValueError: when it has sent what is no request; so does struct.error.
        """
        try:
            while data := self.connection.recv(_PIECE):
                self.incoming += data
            raise ConnectionError("a rank hung up")
        except BlockingIOError:
            pass
        while (request := self._request()) is not None:
            try:
                answer = server.ask(*request)
                kind = _NOTHING if answer is None else _VALUE
            except ValueError as error:
                kind, answer = _REFUSAL, str(error).encode()
            self.outgoing += _ANSWER.pack(kind, len(answer or b"")) + (answer or b"")
        try:
            while self.outgoing:
                piece = bytes(self.outgoing[:_PIECE])
                del self.outgoing[: self.connection.sendmsg([piece], (), socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass

    def _request(self) -> tuple[Ask, str, bytes] | None:
        """Take the next request, if it is there as a whole."""
        if len(self.incoming) < _REQUEST.size:
            return None
        what, name_size, size = _REQUEST.unpack_from(self.incoming)
        middle = _REQUEST.size + name_size
        if len(self.incoming) < middle + size:
            return None
        name, data = self.incoming[_REQUEST.size : middle].decode(), bytes(self.incoming[middle : middle + size])
        del self.incoming[: middle + size]
        return Ask(what), name, data


class ValueClient:
    """Asks the ``ValueServer`` of another rank.

    Args:
        address: where it listens.
        rank: this one.
        timeout_s: how long to wait for it, and for each answer.

    Raises:
        OSError: when it cannot be reached.
    """

    def __init__(self, address: tuple[str, int], rank: int, credentials: Credentials, timeout_s: float) -> None:
        self._connection = reach(address, rank, credentials, timeout_s, waits=True)
        self._connection.settimeout(timeout_s)
        self._failure = ""
        self._turn = threading.Lock()
        _all.add(self)

    def ask(self, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        """Return the answer; None if there is no such value.

        Raises:
            OSError: when the rank that keeps the values is gone, or does not answer in time; and after a call that a
                signal's handler has ended.
            ValueError: as ``ValueServer.ask``.
        """
        head = name.encode()
        with self._turn:
            if self._failure:
                raise ConnectionError(self._failure)
            try:
                self._connection.sendall(_REQUEST.pack(what, len(head), len(data)) + head + data)
                kind, size = _ANSWER.unpack(self._exactly(_ANSWER.size))
                answer = self._exactly(size)
            except BaseException as error:
                # The answer to this request may still come, and the next one would take it for its own.
                self._failure = f"an earlier question to it has failed: {str(error) or type(error).__name__}"
                self._connection.close()
                if isinstance(error, BlockingIOError):
                    raise TimeoutError("it did not answer in time") from error
                raise
        if kind == _REFUSAL:
            raise ValueError(answer.decode())
        return answer if kind == _VALUE else None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("the rank that keeps the run's store hung up")
            view = view[count:]
        return bytes(data)


def swap_data(expected: bytes, wanted: bytes) -> bytes:
    """Return the data of ``Ask.SWAP``; a value that is not there is replaced if ``expected`` is empty."""
    return _LENGTH.pack(len(expected)) + expected + wanted


_all: weakref.WeakSet[ValueServer | ValueClient] = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_all):
        one.close()


# Otherwise a loader worker that outlives its rank would keep the other ranks waiting for that rank.
os.register_at_fork(after_in_child=_close_all)
