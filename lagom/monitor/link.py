"""A rank's end of the channel to the driver: length-limited JSON frames over a connected socket."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import struct
import time
from typing import Any

MAX_FRAME = 1 << 20  # bytes of JSON
_MAX_BACKLOG = 64 << 20  # bytes of log that may wait for a slow driver before lines are dropped

Message = dict[str, Any]


class LinkClosed(ConnectionError):
    """The other end is gone."""


def encode(message: Message) -> bytes:
    """A frame: 4 bytes of length, big-endian, then that many bytes of JSON."""
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes; a frame holds {MAX_FRAME}")
    return struct.pack(">I", len(body)) + body


def proof(secret: bytes, nonce: bytes) -> str:
    """Shows knowledge of ``secret`` without sending it; good for one ``nonce``, so a recorded one opens nothing."""
    return hmac.new(secret, nonce, hashlib.sha256).hexdigest()


class Link:
    """One end of a connection that carries messages both ways."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._dropped = 0

    def fileno(self) -> int:
        """For ``select``."""
        return self.socket.fileno()

    def send(self, message: Message, timeout_s: float = 10.0) -> None:
        """Send ``message`` and all that waited before it; raises LinkClosed when it does not get through in time."""
        self._outgoing += encode(message)
        deadline = time.monotonic() + timeout_s
        while self.flush():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self.socket], [], left)[1]:
                raise LinkClosed(f"the driver took nothing for {timeout_s:g} s")

    def offer(self, message: Message) -> None:
        """Send ``message`` when there is room, without waiting; dropped, and counted, when the other end is slow."""
        if len(self._outgoing) > _MAX_BACKLOG:
            self._dropped += 1
            return
        if self._dropped:
            self._outgoing += encode({"type": "dropped", "messages": self._dropped})
            self._dropped = 0
        self._outgoing += encode(message)
        self.flush()

    def flush(self) -> bool:
        """Write what the socket takes; True when something still waits."""
        try:
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing[: 1 << 18])]
        except BlockingIOError:
            return True
        except OSError as error:
            raise LinkClosed(str(error)) from error
        return False

    def waiting(self) -> bool:
        """Whether something has been offered that the socket has not taken yet."""
        return bool(self._outgoing)

    def poll(self) -> list[Message]:
        """The messages that have arrived; raises LinkClosed at the end of the stream, after the last message."""
        closed = False
        try:
            while chunk := self.socket.recv(1 << 18):
                self._incoming += chunk
            closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        messages = self._take()
        if closed and not messages:
            raise LinkClosed("the other end closed the connection")
        return messages

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None when none arrives in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            # One frame at a time here: what follows it stays for the next call.
            if messages := self._take(limit=1):
                return messages[0]
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.socket], [], [], left)[0]:
                return None
            chunk = self.socket.recv(1 << 18)
            if not chunk:
                raise LinkClosed("the other end closed the connection")
            self._incoming += chunk

    def close(self) -> None:
        """Close the socket; nothing more can be sent."""
        self.socket.close()

    def _take(self, limit: int | None = None) -> list[Message]:
        messages: list[Message] = []
        while len(self._incoming) >= 4 and (limit is None or len(messages) < limit):
            (length,) = struct.unpack_from(">I", self._incoming)
            if length > MAX_FRAME:
                raise LinkClosed(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
            if len(self._incoming) < 4 + length:
                break
            messages.append(_decoded(self._incoming[4 : 4 + length]))
            del self._incoming[: 4 + length]
        return messages


def _decoded(body: bytes | bytearray) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise LinkClosed(f"the other end does not speak our language: {error}") from error
    if not isinstance(message, dict):
        raise LinkClosed("the other end does not speak our language: a frame holds one JSON object")
    return message


def dial(address: tuple[str, int], secret: bytes, hello: Message, timeout_s: float) -> Link | None:
    """Connect to the driver at ``address`` and introduce ourselves; None when it cannot be reached in time."""
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = Link(connection)
    try:
        challenge = link.receive(timeout_s)
        if challenge is None:
            raise LinkClosed("no challenge")
        link.send(hello | {"proof": proof(secret, bytes.fromhex(challenge["nonce"]))}, timeout_s)
    except (OSError, KeyError, TypeError, ValueError):  # gone, or something else listens there
        link.close()
        return None
    return link


def fetch(address: tuple[str, int], secret: bytes, path: str, size: int, sha256: str, timeout_s: float) -> None:
    """Copy the run's payload from the driver into the file ``path``.

    Raises:
        LinkClosed: when it does not arrive, or is not what the driver sent.
    """
    link = dial(address, secret, {"purpose": "fetch"}, timeout_s)
    if link is None:
        raise LinkClosed(f"the driver at {address[0]}:{address[1]} cannot be reached")
    digest, left = hashlib.sha256(), size
    try:
        link.socket.settimeout(timeout_s)
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            while left and (chunk := link.socket.recv(min(left, 1 << 20))):
                file.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
    finally:
        link.close()
    if left or digest.hexdigest() != sha256:
        raise LinkClosed(
            f"{size - left} of {size} bytes arrived" if left else "the bytes that arrived are not those sent"
        )


def deliver(address: tuple[str, int], secret: bytes, name: str, fd: int, timeout_s: float) -> str | None:
    """Send the file ``fd`` to the driver as ``name``; returns its SHA-256, or None when it did not get through."""
    size = os.fstat(fd).st_size
    link = dial(address, secret, {"purpose": "deliver", "name": name, "size": size}, timeout_s)
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
        return digest.hexdigest() if link.receive(timeout_s) else None
    except OSError:
        return None
    finally:
        link.close()
