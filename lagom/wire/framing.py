"""Frames of JSON between driver, host processes and ranks, with a MAC (a seal) on each where strangers can connect.

``send_with_files`` and ``receive_with_files`` pass a message of any size with any number of descriptors. They need a
Unix socket that keeps packets apart (SOCK_SEQPACKET or SOCK_DGRAM).
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from lagom.wire.messages import Message, MessageError, from_json, to_json

MAX_FRAME = 1 << 20  # bytes of JSON
MAX_TEXT = 200_000
"""Most bytes of JSON of each of the few texts that a frame may have."""
NONCE = 16
PROOF = 32
_SEAL = 16

_encode = json.JSONEncoder(default=to_json).encode


class BadFrame(ConnectionError):
    """The bytes are not a frame with the expected seal; no later bytes of the connection can be trusted."""


def body_of(message: Message) -> bytes:
    """Encode ``message`` as the body of a frame.

    Raises:
        ValueError: if the body is too long for one frame.
    """
    body = _encode(message).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes; a frame holds {MAX_FRAME}")
    return body


def shorten(text: str, max_bytes: int = MAX_TEXT, *, keep_end: bool = False) -> str:
    """Cut ``text`` so that its JSON has at most ``max_bytes`` bytes; keep its beginning, or its end with ``keep_end``.

    JSON has 1 to 12 bytes for a character.
    """
    while (size := len(json.dumps(text))) > max_bytes:
        length = len(text) * max_bytes // size
        text = text[len(text) - length :] if keep_end else text[:length]
    return text


def frame_of(body: bytes, seals: FrameSeals | None = None) -> bytes:
    """Build a frame: the length in 4 bytes, big-endian, and then as many bytes: the seal, if any, and the JSON."""
    seal = b"" if seals is None else seals.next(body)
    return struct.pack(">I", len(seal) + len(body)) + seal + body


class FrameSeals:
    """Seals for the frames of one direction of one connection.

    A seal is the first 16 bytes of HMAC-SHA256 over the number of the frame and its JSON. The key is used only for this
    direction of this connection. So a frame that is inserted, changed, repeated or sent back, or that follows an
    omitted frame, does not have the expected seal.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, body: bytes | bytearray) -> bytes:
        """Return the seal of ``body`` as the next frame."""
        self._number += 1
        return hmac.digest(self._key, struct.pack(">Q", self._number) + body, "sha256")[:_SEAL]


class FrameKeys:
    """Proofs and keys derived from the run's secret and the nonces of both ends; see Note [Handshake]."""

    def __init__(self, secret: bytes, driver_nonce: bytes, rank_nonce: bytes) -> None:
        def derived(purpose: bytes) -> bytes:
            return hmac.digest(secret, b"lagom channel 1: " + purpose + driver_nonce + rank_nonce, "sha256")

        self.rank_proof = derived(b"the rank knows the secret")
        self.driver_proof = derived(b"the driver knows the secret")
        self.from_rank = derived(b"seals of the rank")
        self.from_driver = derived(b"seals of the driver")


class Frame(NamedTuple):
    """A message, and its JSON, which can be sent on as it is."""

    message: Message
    body: bytes


class FrameDecoder:
    """Decodes messages from bytes that arrive in pieces of any size."""

    def __init__(self, seals: FrameSeals | None = None) -> None:
        self._seals = seals
        self._limit = MAX_FRAME + (0 if seals is None else _SEAL)
        self._bytes = bytearray()
        self._bad: BadFrame | MessageError | None = None

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self._bytes += data

    def take(self, limit: int | None = None) -> list[Frame]:
        """Return the complete messages, at most ``limit`` of them.

        Raises:
            BadFrame: when a frame is too long, has a wrong seal, or is not a JSON object. Messages before this frame
                are returned first: the next call raises the error.
            MessageError: in the same way, when a JSON object is no message.
        """
        if self._bad is not None:
            raise self._bad
        frames: list[Frame] = []
        position = 0
        try:
            while len(self._bytes) - position >= 4 and (limit is None or len(frames) < limit):
                (length,) = struct.unpack_from(">I", self._bytes, position)
                if length > self._limit:
                    raise BadFrame(f"a frame of {length} bytes; at most {self._limit} are allowed")
                end = position + 4 + length
                if len(self._bytes) < end:
                    break
                frames.append(self._frame(self._bytes[position + 4 : end]))
                position = end
        except (BadFrame, MessageError) as error:
            self._bad = error
            if not frames:
                raise
        del self._bytes[:position]
        return frames

    def rest(self) -> bytes:
        """Return and drop the bytes after the messages that were taken."""
        rest, self._bytes = bytes(self._bytes), bytearray()
        return rest

    def _frame(self, body: bytearray) -> Frame:
        if self._seals is not None:
            seal, body = body[:_SEAL], body[_SEAL:]
            if not hmac.compare_digest(seal, self._seals.next(body)):
                raise BadFrame("a frame without its seal")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"the other end does not speak our language: {error}") from error
        if not isinstance(message, dict):
            raise BadFrame("the other end does not speak our language: a frame holds one JSON object")
        return Frame(from_json(message), bytes(body))


# Note [Handshake]
#
# The secret of a run travels to its tasks inside Spark's job, never over a socket of lagom's. In this Note the end that
# connects is called the rank: it is a rank or a host process. A connection begins with
#
#     driver:  a nonce, 16 bytes
#     rank:    a nonce, 16 bytes, and its proof, 32 bytes; its frames may follow at once
#     driver:  its own proof, 32 bytes; its frames follow
#
# The driver looks only at these 48 bytes of a rank before the rank is proved: it compares the proof in constant time,
# and parses nothing before. Proofs and keys are HMAC-SHA256 with the secret over a purpose and both nonces. So a
# recording of one connection is useless on another, and an attacker cannot use one end's proof as the other end's. Both
# ends prove themselves, so a process that takes over the driver's port after the driver's end cannot tell ranks to
# stop, or where to connect.
#
# Frames have seals because an attacker between the two ends could still write into the connection after the handshake.
# Seals do not encrypt: tls.py does. Files (a large payload, a large outcome) follow a sealed first message without
# seals of their own; their SHA-256 travels with Spark's job and its result.


_MOST = 250  # most descriptors in one packet; the kernel allows 253
_COUNT = struct.Struct("<I")


def send_with_files(connection: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Send ``message`` and the descriptors ``fds``, in as many packets as needed.

    The message is a file as well, the first one: a packet must fit into the send buffer, which the system limits. Only
    one thread at a time may send over ``connection``.
    """
    with open(anonymous_file("message"), "wb") as file:
        file.write(message)
        file.flush()
        sent = [file.fileno(), *fds]
        for first in range(0, len(sent), _MOST):
            socket.send_fds(connection, [_COUNT.pack(len(sent))], sent[first : first + _MOST])


def receive_with_files(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message and its descriptors; both are empty if the sender has ended.

    Raises:
        OSError: if the connection is broken.
    """
    data, fds, _, _ = socket.recv_fds(connection, _COUNT.size, _MOST)
    while data and len(fds) < _COUNT.unpack(data)[0]:
        data, others, _, _ = socket.recv_fds(connection, _COUNT.size, _MOST)
        fds += others
    if not data:
        for fd in fds:
            os.close(fd)
        return b"", []
    with open(fds.pop(0), "rb") as file:
        file.seek(0)
        return file.read(), fds


def anonymous_file(name: str) -> int:
    """Return a descriptor of a new file without a path, which is freed with its last descriptor.

    The file is in memory (memfd) if the system supports that, else in the temporary folder.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"lagom-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
