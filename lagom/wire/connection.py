"""``DriverConnection``: the driver's end of a connection, which first checks the other end's proof of the secret."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import Any

from lagom.wire.framing import NONCE, PROOF, FrameDecoder, FrameKeys, FrameSeals, frame_of
from lagom.wire.messages import Lost, Message, MessageError
from lagom.wire.peer_silence import PeerSilence

STRANGE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, asyncio.TimeoutError)
"""Errors that a stranger can cause, or a peer whose messages are malformed."""


class DriverConnection(asyncio.BufferedProtocol):
    """A connection of the driver's event loop. All methods are called in the event loop's thread.

    Args:
        secret: the secret that the other end has to prove; None for an inherited connection, which needs no proof.
        buffer: receives the bytes that are read; all connections of an event loop may share it. An
            ``asyncio.Protocol`` has no such buffer, and would allocate 256 KB for each message of some hundred bytes.
    """

    def __init__(self, secret: bytes | None, buffer: bytearray) -> None:
        self.hello: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        """The first message after the other end's proof; cancelled if the connection ends before."""
        self.over: Callable[[], None] = lambda: None
        """Callback for the end of the connection."""
        self.lost = False
        """Whether the connection has ended."""
        self._room = asyncio.Event()
        self._room.set()
        self._buffer = memoryview(buffer)
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE)
        self._answer = b""
        self._incoming = FrameDecoder()
        self._outgoing: FrameSeals | None = None
        self._take: Callable[[bytes], None] = self._check_proof
        self._transport: Any = None

    def serve(self, hear: Callable[[Message], None]) -> None:
        """Pass messages from now on to ``hear``; an error of ``STRANGE`` in ``hear`` closes the connection.

        If the other end sends an unknown message, pass ``Lost`` with the reason before the connection is closed.
        """

        def take(data: bytes) -> None:
            self._incoming.feed(data)
            try:
                while frames := self._incoming.take():
                    for frame in frames:
                        hear(frame.message)
            except MessageError as error:
                hear(Lost(message=str(error)))
                raise

        self._take = take
        self._received(b"")

    def receive(self, write: Callable[[bytes], None]) -> None:
        """Pass raw bytes from now on to ``write``."""
        self._take = write
        self._received(self._incoming.rest())

    def send(self, body: bytes) -> None:
        """Send a message encoded by ``body_of``; do nothing if the connection is closed."""
        if not self.gone:
            self._transport.write(frame_of(body, self._outgoing))

    async def write(self, data: bytes) -> None:
        """Send bytes once the buffer has room."""
        await self._room.wait()
        if not self.gone:
            self._transport.write(data)

    def end_writing(self) -> None:
        """Close the sending direction, if the transport supports that."""
        if not self.gone and self._transport.can_write_eof():
            self._transport.write_eof()

    @property
    def connection(self) -> Any:
        """The socket, or asyncio's wrapper of it."""
        return self._transport.get_extra_info("socket")

    @cached_property
    def silence(self) -> PeerSilence:
        """Measures how long the other machine has been silent."""
        return PeerSilence(self.connection)

    @property
    def gone(self) -> bool:
        """Whether the connection is closed, closing, or not made yet."""
        return bool(self._transport is None or self._transport.is_closing())

    @property
    def behind(self) -> bool:
        """Whether the send buffer still has bytes that the socket has not accepted."""
        return not self.gone and self._transport.get_write_buffer_size() > 0

    def close(self) -> None:
        """Abort the connection: a normal close would wait for the other end's reply in TLS."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.BufferedProtocol``, as for all methods below."""
        self._transport = transport
        if self._secret is not None:
            self._transport.write(self._nonce)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process ``nbytes``: a message, a part of one, or several."""
        self._received(bytes(self._buffer[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, in both directions."""
        self.lost = True
        self._room.set()
        self.hello.cancel()
        self.over()

    def pause_writing(self) -> None:
        """Pause writes: the other end reads more slowly than this end sends."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Resume writes."""
        self._room.set()

    def _received(self, data: bytes) -> None:
        try:
            self._take(data)
        except STRANGE:
            self.close()

    def _check_proof(self, data: bytes) -> None:
        """Check the other end's proof, before anything that it sends is parsed. See Note [Handshake] in framing.py."""
        assert self._secret is not None
        wanted = NONCE + PROOF - len(self._answer)
        self._answer += data[:wanted]
        if len(self._answer) < NONCE + PROOF:
            return
        keys = FrameKeys(self._secret, self._nonce, self._answer[:NONCE])
        if not hmac.compare_digest(self._answer[NONCE:], keys.rank_proof):
            self.close()
            return
        self._transport.write(keys.driver_proof)
        self._incoming, self._outgoing = FrameDecoder(FrameSeals(keys.from_rank)), FrameSeals(keys.from_driver)
        self._take = self._greet
        self._greet(data[wanted:])

    def _greet(self, data: bytes) -> None:
        """Decode the first message; later ones wait for ``serve`` or ``receive``."""
        self._incoming.feed(data)
        if not self.hello.done() and (frames := self._incoming.take(limit=1)):
            self.hello.set_result(frames[0].message)
