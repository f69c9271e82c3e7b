"""``DriverListener``: accepts connections to the driver, and admits those that prove the run's secret."""

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
from lagom.wire.framing import Message

MAX_STRANGERS = 256
"""Connections without a proof yet, at the same time: above this number, the oldest is closed."""
_FILES = 128  # files that this process may open besides
_BACKLOG = 1024


class DriverListener:
    """Admits connections that know ``secret``; Note [Strangers] bounds what others can cost.

    ``admit(peer, hello)`` is called for each admitted connection; one that has proved nothing after ``hello_s``
    seconds is closed. All methods run in the event loop's thread.
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
        """Accept connections for ever, encrypted by ``tls`` if it is given."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # closed again, or this process can open no more files
                    self._hang_up_on_oldest()
                    await asyncio.sleep(0.05)
                    continue
                task = loop.create_task(self._greet(connection, tls))
                self._strangers[task] = None
                task.add_done_callback(functools.partial(self._forget, connection))
                await asyncio.sleep(0)  # admitted connections are served first
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
        """Admit a connection once it has proved that it knows the secret; close others without reading more."""
        peer = DriverConnection(self._secret, self._buffer)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_s = None if tls is None else self._hello_s
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: peer, connection, ssl=tls, ssl_handshake_timeout=limit_s
            )
            self._admit(peer, await asyncio.wait_for(peer.hello, self._hello_s))
        except STRANGE:
            peer.close()  # no client of ours, or closed again
        except asyncio.CancelledError:
            peer.close()  # closed again, or the channel closes or has too many strangers; asyncio would print the error
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
    """Raise the soft limit of open files in the context, by one for each task and a reserve, if it would be too low."""
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
# The driver listens on its own address, at a port that anybody in the network can find. A connection without a proof
# that it knows the run's secret (Note [Handshake] in framing.py) costs the driver an open file for at most 5 s, and the
# time of an HMAC; none of its bytes are parsed or kept. At most 256 such connections are open: above that, the oldest
# is closed, because a client of ours proves itself within a round trip while others take their time, and a client of
# ours that was closed tries again. Connections are accepted one at a time between the messages of admitted ones, so a
# flood delays ranks by no more than the time to accept one. If so many tasks connect that the process could run out of
# files, its limit is raised for the run, and restored.
