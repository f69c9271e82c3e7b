"""``DriverListener``: accepts connections to the driver, and admits clients that prove the run's secret."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any

from lagom.wire.connection import STRANGE, DriverConnection
from lagom.wire.messages import Message

MAX_STRANGERS = 256
"""Most connections without a proof at the same time: above this number, the oldest is closed."""
_FILES = 128  # reserve of open files for all other purposes of this process
_BACKLOG = 1024


class DriverListener:
    """Admits connections whose other end knows ``secret``; Note [Strangers] says how the cost of others is bounded.

    ``admit(peer, hello)`` is called for each admitted connection. A connection without a proof and a first message
    after ``hello_s`` seconds is closed; with TLS, its handshake may take ``hello_s`` more. All methods run in the event
    loop's thread.
    """

    def __init__(
        self, secret: bytes, admit: Callable[[DriverConnection, Message], None], buffer: bytearray, hello_s: float
    ) -> None:
        self._secret = secret
        self._admit = admit
        self._buffer = buffer
        self._hello_s = hello_s
        self._strangers: dict[asyncio.Task[None], None] = {}  # in order of arrival

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections until this task is cancelled; encrypt them by ``tls`` unless it is None."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # the client hung up, or this process can open no more files
                    self._hang_up_on_oldest()
                    await asyncio.sleep(0.05)
                    continue
                task = loop.create_task(self._greet(connection, tls))
                self._strangers[task] = None
                task.add_done_callback(functools.partial(self._forget, connection))
                await asyncio.sleep(0)  # let the event loop serve admitted connections before the next is accepted
                if len(self._strangers) > MAX_STRANGERS:
                    self._hang_up_on_oldest()

    def _hang_up_on_oldest(self) -> None:
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        if task.cancelled():  # cancelled before it had begun
            connection.close()

    async def _greet(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Admit a connection once its other end has proved that it knows the secret; else close the connection."""
        peer = DriverConnection(self._secret, self._buffer)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_s = None if tls is None else self._hello_s
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: peer, connection, ssl=tls, ssl_handshake_timeout=limit_s
            )
            self._admit(peer, await asyncio.wait_for(peer.hello, self._hello_s))
        except STRANGE:
            peer.close()  # not a client of this run, or the client hung up
        except asyncio.CancelledError:
            # The client hung up, the channel closes, or there are too many strangers. Do not raise: asyncio would print
            # the error.
            peer.close()
        finally:
            if peer.gone:
                connection.close()


def listening_socket(host: str) -> socket.socket:
    """Return a listening socket on ``host``, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def files_for(num_tasks: int) -> Any:
    """Context manager that raises the soft limit of open files, for ``num_tasks`` and a reserve, if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_tasks + MAX_STRANGERS + _FILES
    unlimited = resource.RLIM_INFINITY
    if soft in (unlimited, hard) or wanted <= soft // 2:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + wanted if hard == unlimited else min(soft + wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Note [Strangers]
#
# The driver listens on its own address, at a port that every process in the network can find. A connection without a
# proof of the run's secret (Note [Handshake] in framing.py) costs the driver an open file for at most 5 s, and the time
# of an HMAC; lagom parses none of its bytes. With TLS it costs at most 10 s, and a TLS handshake. At most 256 such
# connections are open. Above this number the oldest is closed: a client of this run proves itself within a few round
# trips, so the oldest is most probably a stranger; a client that was closed tries again. Connections are accepted one
# at a time, between the messages of admitted connections. So a flood of connections delays ranks by no more than the
# time to accept one. If so many tasks will connect that the process could run out of open files, its limit is raised
# for the run, and restored afterwards.
