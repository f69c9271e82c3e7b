"""``PeerSilence``: for how long the machine at the other end of a connection has been silent.

See Note [Silence].
"""

from __future__ import annotations

import math
import socket
import struct
import time
from typing import Any

_PROBE_S = 1
_JITTER_S = 0.1  # the kernel counts the age of an answer in ticks
_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_INFO")
_INFO = struct.Struct("=2x2B48x2I")
"""Fields of Linux's tcp_info: retransmissions and probes without an answer so far; milliseconds since the last data
arrived, and since the last acknowledgement."""


def probe_silence(connection: Any, lost_after_s: float) -> None:
    """Have the kernel probe the other machine each second; after ``lost_after_s`` without an answer it is lost.

    While our data is unacknowledged the kernel retransmits instead, for longer: ask ``PeerSilence`` then.
    """
    if connection.family == socket.AF_UNIX or not all(hasattr(socket, name) for name in _OPTIONS):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, math.ceil(lost_after_s / _PROBE_S))


class PeerSilence:
    """For how long the machine at the other end of ``connection`` has been silent."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._since: float | None = None  # by time.monotonic()

    def seconds(self) -> float:
        """Return for how long a probe or data of ours has been without an answer, 0 if that is unknown.

        Call it each second or so: it counts from the call that first finds no answer, and at most a second before that.
        """
        age_s, now = _unanswered_s(self._connection), time.monotonic()
        if age_s is None:
            self._since = None
            return 0.0
        if self._since is None or now - age_s > self._since + _JITTER_S:  # answered since: this is another probe
            self._since = now - min(age_s, _PROBE_S)
        return now - self._since


def _unanswered_s(connection: Any) -> float | None:
    """Return the seconds since the peer's last answer; None if it owes none to repeated data or a keepalive probe."""
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # the connection is closed
        return None
    if len(info) < _INFO.size:
        return None
    repeats, probes, *ages = _INFO.unpack(info)
    return min(ages) / 1e3 if repeats or probes else None


# Note [Silence]
#
# The other machine's kernel, not our process on it, shows whether the machine is there: the kernel answers TCP's
# keepalive at once, while a rank computes without releasing the GIL, while a process is stopped or waits for a disk,
# and while a busy machine lets our processes wait for seconds. This machine's kernel knows when the last answer came,
# so a driver that could not run blames no other machine. Heartbeats of our own processes would report each busy host as
# gone. A silent machine is named after 4 to 5 s. The run ends after 20 s, because a network recovers by itself from
# less: a switch restarts, a virtual machine moves.
#
# A machine whose process reads nothing, such as a driver under Ctrl-Z, answers too, but is probed ever more rarely, at
# last every two minutes. A probe that has just been sent has no answer yet, and the last one may be two minutes old; so
# silence counts from the probe. TCP_USER_TIMEOUT would end such a connection, as its data does not get through.
