"""``silent_s``: for how long the machine at the other end of a connection has given no sign of life.

See Note [Silence].
"""

from __future__ import annotations

import math
import socket
import struct
from typing import Any

_PROBE_S = 1
_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_INFO")
_INFO = struct.Struct("=2x2B48x2I")
"""Of Linux's tcp_info: how often data was sent again, and probes were sent, without an answer so far; milliseconds
since data came last, and since something of ours was acknowledged last."""


def probe_silence(connection: Any, lost_after_s: float) -> None:
    """Have the system ask the other machine each second whether it is there; after so long without it is lost.

    Where data of ours is on its way the system asks by sending it again, for longer: see ``silent_s`` then.
    """
    if connection.family == socket.AF_UNIX or not all(hasattr(socket, name) for name in _OPTIONS):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, math.ceil(lost_after_s / _PROBE_S))


def silent_s(connection: Any) -> float:
    """Seconds since anything came from the other machine, while a probe or data of ours is without an answer.

    0 where nobody can say.
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # it is closed
        return 0.0
    if len(info) < _INFO.size:
        return 0.0
    repeats, probes, *ages = _INFO.unpack(info)
    return min(ages) / 1e3 if repeats or probes else 0.0


# Note [Silence]
#
# Whether a machine is there is asked of its system, not of our process on it: the kernel answers TCP's keepalive at
# once, while a rank computes without letting any other thread have its turn, while a process is stopped or waits for
# a disk, and while a busy machine lets our processes wait for seconds. How long ago the last answer came is asked of
# the kernel here, so that a driver that was kept from running blames nobody. A beat that our own processes send would
# say each time that a host is gone which only has much to do. What is silent is named after 4 s. The run ends after
# 20 s, since a network comes back by itself from less: a switch starts anew, a virtual machine moves.
#
# A machine whose process takes in nothing, such as a driver under Ctrl-Z, answers too, but is asked ever more rarely,
# at last every two minutes: it is silent only while a question is without an answer. TCP_USER_TIMEOUT would end such a
# connection, as its data does not get through.
