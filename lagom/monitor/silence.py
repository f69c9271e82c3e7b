"""``silent_s``: for how long the machine at the other end of a connection has given no sign of life.

See Note [Silence].
"""

from __future__ import annotations

import socket
import struct
from typing import Any

_PROBE_S = 1
_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT", "TCP_INFO")
_AGES = struct.Struct("=52x2I")
"""Of Linux's tcp_info: milliseconds since data came last, and since something of ours was acknowledged last."""


def probe(connection: Any, lost_after_s: float) -> None:
    """Have the system ask the other machine each second whether it is there; after so long without it is lost."""
    if connection.family == socket.AF_UNIX or not all(hasattr(socket, name) for name in _OPTIONS):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * lost_after_s))


def silent_s(connection: Any) -> float:
    """Seconds since anything came from the other machine, over a connection that is probed; 0 where nobody can say."""
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AGES.size)
    except OSError:  # it is closed
        return 0.0
    return min(_AGES.unpack(info)) / 1e3 if len(info) == _AGES.size else 0.0


# Note [Silence]
#
# Whether a machine is there is asked of its system, not of our process on it: the kernel answers TCP's keepalive at
# once, while a rank computes without letting any other thread have its turn, while a process is stopped or waits for
# a disk, and while a busy machine lets our processes wait for seconds. How long ago the last answer came is asked of
# the kernel here, so that a driver that was kept from running blames nobody. A beat that our own processes send would
# say each time that a host is gone which only has much to do. What is silent is named after 4 s. The run ends after
# 20 s, since a network comes back by itself from less: a switch starts anew, a virtual machine moves.
