"""Files without a path, and messages of any size with any number of descriptors.

``send_with_files`` and ``receive_with_files`` need a Unix socket that keeps packets apart (SOCK_SEQPACKET or
SOCK_DGRAM).
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Sequence

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
