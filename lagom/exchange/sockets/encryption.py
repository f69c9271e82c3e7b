"""``encrypted``: encrypts a connection between two ranks by TLS. See Note [Encryption between hosts]."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BLOCK = 1 << 16
"""Most bytes that one call sends, so that a thread that alternates between sending and receiving keeps both busy."""
_WAIT_ALL = int(socket.MSG_WAITALL)  # an int, since ``&`` of the enum takes longer than a small message
_HANDSHAKE_S = 30.0
_CLOSE_S = 1.0
_WOULD_WAIT = ssl.SSLWantReadError, ssl.SSLWantWriteError
_Result = TypeVar("_Result")


class Credentials(NamedTuple):
    """Key and certificates that only the ranks of a run have."""

    key: bytes = b""
    """Secret with which ranks prove to each other that they belong to the run."""
    accepting: ssl.SSLContext | None = None
    """Context for connections that other hosts open; None to leave them unencrypted."""
    connecting: ssl.SSLContext | None = None
    """Context for connections that this host opens; None to leave them unencrypted."""

    @property
    def encrypt(self) -> bool:
        """Whether connections between hosts are encrypted."""
        return self.accepting is not None

    def __repr__(self) -> str:
        return f"Credentials(encrypt={self.encrypt})"  # without the key: a traceback's local variables may be logged


NO_CREDENTIALS = Credentials()


class EncryptedSocket:
    """An encrypted connection with those methods of a socket that exchanges call; it raises a socket's errors.

    One thread may send while another one receives.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self.family = connection.family
        self._connection = connection
        self._timeout_s: float | None = None
        self._is_closed = False
        # OpenSSL forbids two threads in one connection. The lock also keeps ``close`` from closing the descriptor while
        # a call uses it: a new file could get the same descriptor.
        self._turn = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, for ``poll``; -1 after ``close``."""
        return self._connection.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the TCP connection."""
        self._connection.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return an option of the TCP connection."""
        return self._connection.getsockopt(level, option, size)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set how long calls wait before they raise a BlockingIOError; None: without a limit, 0: not at all."""
        self._timeout_s = timeout_s

    def setblocking(self, flag: bool) -> None:
        """Set whether calls wait without a limit, or not at all."""
        self.settimeout(None if flag else 0.0)

    def sendmsg(self, parts: Sequence[bytes | memoryview], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Send at most the first 64 KB of ``parts`` without waiting; return the number of bytes sent.

        ``ancillary`` and ``flags`` are ignored.

        Raises:
            BlockingIOError: when the kernel's buffer has no room for all these bytes. The next call must begin with the
                same bytes, since OpenSSL may have sent some of them.
        """
        return self._call(partial(self._connection.send, _first_block(parts)))

    def sendall(self, data: bytes) -> None:
        """Send all of ``data``."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._wait(select.POLLOUT, partial(self._connection.send, rest[:_BLOCK])) :]

    def recv(self, size: int) -> bytes:
        """Return at most ``size`` bytes; b"" if the other end has closed the connection."""
        return self._wait(select.POLLIN, partial(self._connection.recv, size))

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        """Receive into ``view``, and return the number of bytes: at least one, with MSG_WAITALL all; 0 at the end.

        Raises:
            BlockingIOError: when no further byte arrives in time.
        """
        size = size or len(view)
        found = count = self._wait(select.POLLIN, partial(self._read, view[:size]))
        while flags & _WAIT_ALL and found and count < size:
            found = self._wait(select.POLLIN, partial(self._read, view[count:size]))
            count += found
        return count

    def shutdown(self, how: int) -> None:
        """Shut the connection down, which also ends calls of other threads."""
        socket.socket.shutdown(self._connection, how)  # only TCP's shutdown: another thread may be inside OpenSSL

    def close(self) -> None:
        """Close the connection, even while another thread sends or receives."""
        # Do not wait for ever: in a forked child, a thread that was not copied may hold the lock.
        has_turn = self._turn.acquire(timeout=_CLOSE_S)
        self._is_closed = True
        self._connection.close()
        if has_turn:
            self._turn.release()

    def _read(self, view: memoryview) -> int:
        """Read the TLS records that have arrived into ``view``; return the number of bytes."""
        count = 0
        try:
            while num_read := self._connection.recv_into(view[count:]):
                count += num_read
                if count == len(view):
                    break
        except _WOULD_WAIT:
            if not count:
                raise
        return count

    def _call(self, function: Callable[[], _Result]) -> _Result:
        """Call ``function``, which must not block, with the lock held, and turn TLS errors into a socket's errors."""
        with self._turn:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            try:
                return function()
            except _WOULD_WAIT as error:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                raise ConnectionResetError("the other end hung up") from error
            except ssl.SSLError as error:
                raise ConnectionError(f"an encrypted connection has failed: {error}") from error

    def _wait(self, event: int, function: Callable[[], _Result]) -> _Result:
        """Call ``function`` again after each wait for ``event``, until it does not block; return its result."""
        while True:
            try:
                return self._call(function)
            except BlockingIOError:
                if self._timeout_s == 0 or (number := self.fileno()) < 0:
                    raise
            poll = select.poll()
            poll.register(number, event)
            if not poll.poll(None if self._timeout_s is None else 1e3 * self._timeout_s):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


Connection = socket.socket | EncryptedSocket


def encrypted(connection: socket.socket, credentials: Credentials, *, accepts: bool) -> Connection:
    """Return ``connection`` encrypted; return it unchanged if it is a Unix socket or there are no certificates.

    Args:
        accepts: whether the other end has opened the connection.

    Raises:
        OSError: when the other end is not a rank of this run, or does not answer.
    """
    context = credentials.accepting if accepts else credentials.connecting
    if context is None or connection.family == socket.AF_UNIX:
        return connection
    connection.settimeout(_HANDSHAKE_S)
    return EncryptedSocket(context.wrap_socket(connection, server_side=accepts))


def _first_block(parts: Sequence[bytes | memoryview]) -> bytes | memoryview:
    """Return the first ``_BLOCK`` bytes of ``parts``, without a copy if they are all in one part."""
    pieces: list[memoryview] = []
    room = _BLOCK
    for part in parts:
        pieces.append(memoryview(part)[:room])
        room -= len(pieces[-1])
        if not room:
            break
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# Note [Encryption between hosts]
#
# If Spark's encryption is set, and ``allow_unencrypted_collectives`` is False, ranks encrypt their connections to other
# hosts, by TLS 1.3 (Python's ssl). The driver makes one key and one certificate for all ranks of the run, which travel
# with the run's secret inside Spark's job. Each end of a connection shows the certificate, proves that it has the key,
# and accepts no other certificate. The proofs of Note [Proofs of ranks] in handshake.py come first, unencrypted: a
# stranger fails there as it does without encryption, and reaches no code of OpenSSL. A man in the middle can pass on
# the proofs of two ranks, but then lacks the certificate's key. It could also pass on the proofs, and then exchange two
# connections before TLS begins: all ranks have the same certificate. So both ends repeat their claims inside TLS
# (``_proven`` in connect.py).
