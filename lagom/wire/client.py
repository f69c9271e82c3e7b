"""``DriverClient``: one end of a connection that carries JSON frames, such as a host process's end of the channel."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import ssl
import time

from lagom.wire.framing import NONCE, PROOF, BadFrame, Frame, FrameDecoder, FrameKeys, FrameSeals, body_of, frame_of
from lagom.wire.messages import DeliverHello, Dropped, Message, MessageError, Received
from lagom.wire.peer_silence import PeerSilence, probe_silence

MAX_BACKLOG_BYTES = 64 << 20  # bytes that may wait for a slow driver; offered messages beyond are dropped
_TRIES = 3
LOST_AFTER_S = 120.0
"""Seconds of silence after which the driver's machine is lost; as long as Spark's limit, since a laptop may sleep."""
_WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _is_ready(connection: socket.socket, event: int, timeout_s: float) -> bool:
    poll = select.poll()  # ``select`` does not take descriptors above 1023
    poll.register(connection, event)
    return bool(poll.poll(1e3 * timeout_s))


class LinkClosed(ConnectionError):
    """The connection has ended or is given up: the other end is too slow, or has sent bytes that are not expected."""


class DriverClient:
    """One end of a connection that carries messages both ways.

    Args:
        connection: the socket, from an inherited pair or connected by ``dial``.
        incoming: decoder of the other end's frames; None for frames without seals.
        outgoing: seals of this end's frames; None for no seals, on a connection that strangers cannot reach.
    """

    def __init__(
        self, connection: socket.socket, incoming: FrameDecoder | None = None, outgoing: FrameSeals | None = None
    ) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._silence = PeerSilence(connection)
        self._incoming = incoming or FrameDecoder()
        self._seals = outgoing
        self._outgoing = bytearray()
        self._dropped = 0

    def fileno(self) -> int:
        """Return the file descriptor, for ``select``."""
        return self.socket.fileno()

    def send(self, message: Message | bytes, timeout_s: float = 10.0) -> None:
        """Send ``message``, or the body of a frame, after all queued messages.

        Raises:
            LinkClosed: when not all of them are sent in ``timeout_s``, or the connection has ended.
            ValueError: when ``message`` is too long for a frame.
        """
        self._queue(message)
        deadline = time.monotonic() + timeout_s
        while self.flush():
            left = deadline - time.monotonic()
            if left <= 0 or not _is_ready(self.socket, select.POLLOUT, left):
                raise LinkClosed(f"the driver took nothing for {timeout_s:g} s")

    def offer(self, message: Message | bytes) -> None:
        """Queue ``message``, and send as much as possible without waiting; drop and count it if the queue is full.

        Raises:
            LinkClosed, ValueError: as ``send``.
        """
        if len(self._outgoing) > MAX_BACKLOG_BYTES:
            self._dropped += 1
            return
        if self._dropped:
            self._queue(Dropped(messages=self._dropped))
            self._dropped = 0
        self._queue(message)
        self.flush()

    def flush(self) -> bool:
        """Write as much as the socket accepts; return whether bytes are left; LinkClosed if the connection ended."""
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing[: 1 << 18])]
        except _WOULD_WAIT:
            return True
        except OSError as error:
            raise LinkClosed(str(error)) from error
        return False

    def give_up_silent(self) -> None:
        """Shut the connection down if the other machine was silent for ``LOST_AFTER_S``, so that ``poll`` raises."""
        if self._silence.seconds() >= LOST_AFTER_S:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def waiting(self) -> bool:
        """Return whether queued bytes are left that the socket has not accepted."""
        return bool(self._outgoing)

    def poll(self) -> list[Message]:
        """Return the messages that have arrived; raise LinkClosed at the end of the stream, after the last message."""
        return [frame.message for frame in self.poll_frames()]

    def poll_frames(self) -> list[Frame]:
        """Return the messages that have arrived, with their JSON; raise LinkClosed as ``poll``."""
        closed = False
        try:
            while chunk := self.socket.recv(1 << 18):
                self._incoming.feed(chunk)
            closed = True
        except _WOULD_WAIT:
            pass
        except OSError:
            closed = True
        frames = self._take()
        if closed and not frames:
            raise LinkClosed("the other end closed the connection")
        return frames

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, or None if none arrives in time.

        Raises:
            LinkClosed: when the connection has ended, or the other end has sent bytes that are no message.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # Decode one frame at a time: later frames stay for the next call.
            if frames := self._take(limit=1):
                return frames[0].message
            try:
                chunk = self.socket.recv(1 << 18)  # before the wait: TLS may hold bytes that ``poll`` does not see
            except _WOULD_WAIT:
                left = deadline - time.monotonic()
                if left <= 0 or not _is_ready(self.socket, select.POLLIN, left):
                    return None
                continue
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not chunk:
                raise LinkClosed("the other end closed the connection")
            self._incoming.feed(chunk)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _queue(self, message: Message | bytes) -> None:
        body = message if isinstance(message, bytes) else body_of(message)
        self._outgoing += frame_of(body, self._seals)

    def _take(self, limit: int | None = None) -> list[Frame]:
        try:
            return self._incoming.take(limit)
        except (BadFrame, MessageError) as error:
            raise LinkClosed(str(error)) from error


def dial(
    address: tuple[str, int], secret: bytes, hello: Message, timeout_s: float, certificate: str = ""
) -> DriverClient | None:
    """Connect to the driver, and prove the secret.

    Args:
        hello: the first message, which says the connection's purpose.
        certificate: the driver's certificate (PEM), the only one that is accepted; "" for no encryption.

    Returns:
        The connection; None if ``address`` cannot be reached, or three tries in ``timeout_s`` do not give both proofs.
    """
    tls = None
    if certificate:
        from lagom.wire.tls import trusting

        tls = trusting(certificate)
    deadline = time.monotonic() + timeout_s
    for _ in range(_TRIES):
        try:
            connection = socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic()))
        except OSError:
            return None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            probe_silence(connection, LOST_AFTER_S)
            if tls is not None:
                connection = tls.wrap_socket(connection)
            return _authenticate(connection, secret, hello, deadline)
        except (OSError, EOFError, ValueError):  # the driver hung up, or another program listens there
            connection.close()
        # Try again: while many strangers connect, the driver closes the oldest connections without a proof.
        pause_s = 0.02 + secrets.randbelow(80) / 1000
        if time.monotonic() + pause_s >= deadline:
            return None
        time.sleep(pause_s)
    return None


def _authenticate(connection: socket.socket, secret: bytes, hello: Message, deadline: float) -> DriverClient:
    """Prove the secret, send ``hello``, and check the driver's proof. See Note [Handshake] in framing.py."""
    nonce = secrets.token_bytes(NONCE)
    keys = FrameKeys(secret, _receive_exactly(connection, NONCE, deadline), nonce)
    link = DriverClient(connection, FrameDecoder(FrameSeals(keys.from_driver)), FrameSeals(keys.from_rank))
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    connection.sendall(nonce + keys.rank_proof)
    connection.setblocking(False)
    link.send(hello, max(0.01, deadline - time.monotonic()))
    if not hmac.compare_digest(_receive_exactly(connection, PROOF, deadline), keys.driver_proof):
        raise LinkClosed("what listens there is not the driver")
    connection.setblocking(False)
    return link


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def deliver(
    address: tuple[str, int], secret: bytes, name: str, fd: int, timeout_s: float, certificate: str = ""
) -> str | None:
    """Send the file ``fd`` to the driver as ``name``; return its SHA-256, or None if it did not arrive.

    Args:
        timeout_s: how long to wait for the connection, for room to send each part, and for the driver's answer.
    """
    size = os.fstat(fd).st_size
    link = dial(address, secret, DeliverHello(name=name, size=size), timeout_s, certificate)
    if link is None:
        return None
    digest, position = hashlib.sha256(), 0
    try:
        link.socket.settimeout(timeout_s)
        while position < size:
            chunk = os.pread(fd, 1 << 20, position)
            link.socket.sendall(chunk)
            digest.update(chunk)
            position += len(chunk)
        link.socket.setblocking(False)
        return digest.hexdigest() if isinstance(link.receive(timeout_s), Received) else None
    except OSError:
        return None
    finally:
        link.close()
