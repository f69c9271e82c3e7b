"""``DriverListener``: where the driver listens; who knocks there, and whom it lets in."""

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

_HELLO_S = 5.0
_STRANGERS = 256
"""Connections that have not proved themselves, at the same time: of more, the oldest is hung up on."""
_FILES = 128  # that this process may want to open besides
_BACKLOG = 1024


class DriverListener:
    """Lets those in who know ``secret``; what others can do is told in Note [Strangers].

    ``admit(peer, hello)`` is called for each that is let in. All methods are for the thread of the event loop.
    """

    def __init__(self, secret: bytes, admit: Callable[[DriverConnection, Message], None], buffer: bytearray) -> None:
        self._secret = secret
        self._admit = admit
        self._buffer = buffer
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order in which they came

    async def accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Take connections, encrypted by ``tls``, for ever."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # gone again, or this process can open no more files
                    self._hang_up_on_oldest()
                    await asyncio.sleep(0.05)
                    continue
                task = loop.create_task(self._greet(connection, tls))
                self._strangers[task] = None
                task.add_done_callback(functools.partial(self._forget, connection))
                await asyncio.sleep(0)  # who is in comes before who is at the door
                if len(self._strangers) > _STRANGERS:
                    self._hang_up_on_oldest()

    def _hang_up_on_oldest(self) -> None:
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        if task.cancelled():  # before it had begun
            connection.close()

    async def _greet(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        """A stranger: it proves that it knows the secret, or it is sent away unread."""
        peer = DriverConnection(self._secret, self._buffer)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_s = None if tls is None else _HELLO_S
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: peer, connection, ssl=tls, ssl_handshake_timeout=limit_s
            )
            self._admit(peer, await asyncio.wait_for(peer.hello, _HELLO_S))
        except STRANGE:
            peer.close()  # not one of ours, or gone again
        except asyncio.CancelledError:
            peer.close()  # gone again, or the channel closes, or has too many strangers; asyncio would print it
        finally:
            if peer.gone:
                connection.close()


def listening(host: str) -> socket.socket:
    """A listening socket on ``host``, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def files_for(num_tasks: int) -> Any:
    """Let this process open a file more for each task meanwhile, where its (soft) limit is too low for so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_tasks + _STRANGERS + _FILES
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
# The driver listens on its own address, at a port that anybody in the network can find. Who cannot prove that it knows
# the run's secret (Note [Handshake] in framing.py) costs the driver an open file for at most 5 s, and the time of an
# HMAC; nothing that it sends is parsed or kept. At most 256 are there unproved: of more, the one that came first goes,
# since one of ours proves itself within a round trip while the others take their time, and it tries again where it was
# thrown out. Connections are taken one at a time between the messages of those who are in, so a flood keeps ranks
# waiting for no longer than it takes to accept one. Where so many tasks come that the process could run out of files,
# its limit is raised for the run, and put back.
