"""``send_with_files``, ``receive_with_files``: pass a message with any number of descriptors over a Unix socket.

The socket must keep messages apart (SOCK_SEQPACKET or SOCK_DGRAM).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

_MOST = 250  # most descriptors in one packet; the kernel allows 253
_COUNT = struct.Struct("<I")


def send_with_files(connection: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    """Send ``message`` and the descriptors ``fds``, in as many packets as needed.

    Only one thread at a time may send over ``connection``.
    """
    socket.send_fds(connection, [_COUNT.pack(len(fds)) + message], fds[:_MOST])
    for first in range(_MOST, len(fds), _MOST):
        socket.send_fds(connection, [b"f"], fds[first : first + _MOST])


def receive_with_files(connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Return the next message, of at most ``size`` bytes, and its descriptors; both are empty if the sender has ended.

    Raises:
        OSError: if the connection is broken.
    """
    data, fds, _, _ = socket.recv_fds(connection, size + _COUNT.size, _MOST)
    while data and len(fds) < _COUNT.unpack_from(data)[0]:
        more, others, _, _ = socket.recv_fds(connection, 1, _MOST)
        fds += others
        if not more:
            for fd in fds:
                os.close(fd)
            return b"", []
    return data[_COUNT.size :], fds
