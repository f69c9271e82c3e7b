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
"""Most bytes that one call sends, so that who sends and receives by turns keeps both directions full."""
_WAIT_ALL = int(socket.MSG_WAITALL)  # the enum's own & takes longer than a small message
_HANDSHAKE_S = 30.0
_CLOSE_S = 1.0
_WOULD_WAIT = ssl.SSLWantReadError, ssl.SSLWantWriteError
_Result = TypeVar("_Result")


class Credentials(NamedTuple):
    """Key and certificates that the ranks of a run have and strangers have not."""

    key: bytes = b""
    """Proves a rank to another one."""
    accepting: ssl.SSLContext | None = None
    """Encrypts connections that other hosts begin; None if they stay in clear."""
    connecting: ssl.SSLContext | None = None
    """Encrypts connections that this host begins; None if they stay in clear."""

    @property
    def encrypt(self) -> bool:
        """Whether connections between hosts are encrypted."""
        return self.accepting is not None

    def __repr__(self) -> str:
        return f"Credentials(encrypt={self.encrypt})"  # without the key: a traceback's local variables may be logged


NO_CREDENTIALS = Credentials()


class EncryptedSocket:
    """An encrypted connection with the methods of a socket that exchanges call, and with a socket's errors.

    One thread may send while another one receives.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self.family = connection.family
        self._connection = connection
        self._timeout_s: float | None = None
        self._is_closed = False
        # OpenSSL forbids two threads in one connection; and the number of a closed file may be another file's already.
        self._turn = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, for ``poll``; -1 after ``close``."""
        return self._connection.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """Set how long calls wait; None is for ever, and 0 not at all."""
        self._timeout_s = timeout_s

    def setblocking(self, flag: bool) -> None:
        """Set whether calls wait without a limit, or not at all."""
        self.settimeout(None if flag else 0.0)

    def sendmsg(self, parts: Sequence[bytes | memoryview], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Send the first 64 KB of ``parts``, or all if they are fewer, and never wait; return the number of bytes.

        Raises:
            BlockingIOError: when there is no room for all of them. The next call must begin with the same bytes, of
                which OpenSSL may have sent some.
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
        """Put what has come into ``view``, or wait for some, or for all with MSG_WAITALL; return the number of bytes.

        Raises:
            BlockingIOError: when nothing has come in time.
        """
        size = size or len(view)
        found = count = self._wait(select.POLLIN, partial(self._read, view[:size]))
        while flags & _WAIT_ALL and found and count < size:
            found = self._wait(select.POLLIN, partial(self._read, view[count:size]))
            count += found
        return count

    def shutdown(self, how: int) -> None:
        """End the connection, so that calls of other threads end too."""
        socket.socket.shutdown(self._connection, how)  # TCP's alone: another thread may use what OpenSSL has

    def close(self) -> None:
        """Close the connection, also under a call of another thread."""
        has_turn = self._turn.acquire(timeout=_CLOSE_S)  # in a forked child, a thread that is not there may have it
        self._is_closed = True
        self._connection.close()
        if has_turn:
            self._turn.release()

    def _read(self, view: memoryview) -> int:
        """Put the records that have come into ``view``."""
        count = 0
        try:
            while found := self._connection.recv_into(view[count:]):
                count += found
                if count == len(view):
                    break
        except _WOULD_WAIT:
            if not count:
                raise
        return count

    def _call(self, function: Callable[[], _Result]) -> _Result:
        """Return what ``function`` returns, which does not wait."""
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
        """Return what ``function`` returns once it need not wait."""
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
    """Return ``connection`` encrypted, unless it stays in this host or connections stay in clear.

    Args:
        accepts: whether the other end has begun the connection.

    Raises:
        OSError: when the other end is no rank of this run, or does not answer.
    """
    context = credentials.accepting if accepts else credentials.connecting
    if context is None or connection.family == socket.AF_UNIX:
        return connection
    connection.settimeout(_HANDSHAKE_S)
    return EncryptedSocket(context.wrap_socket(connection, server_side=accepts))


def _first_block(parts: Sequence[bytes | memoryview]) -> bytes | memoryview:
    """Return the first bytes of ``parts``; those of a single part are not copied."""
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
# If Spark encrypts its traffic, ranks encrypt what they send to other hosts, by TLS 1.3 (Python's ssl). The driver
# makes a key and a certificate for the ranks of the run, which travel with the secret, inside Spark's job. All ranks
# have the same: each end shows the certificate, proves that it has the key, and accepts no other certificate. The
# proofs of Note [Proofs of ranks] in handshake.py come first, in clear: a stranger gets no further than without
# encryption, and reaches no code of OpenSSL. Who stands between two ranks can hand on their proofs, but then lacks the
# certificate's key.
