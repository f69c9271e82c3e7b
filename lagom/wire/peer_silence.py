"""``PeerSilence``: measures how long the machine at the other end of a connection has been silent.

See Note [Silence].
"""

from __future__ import annotations

import math
import socket
import struct
import time
from typing import Any

LOST_S = 20.0
"""Seconds of silence after which a machine counts as lost; or ``timeout_s``, if that is shorter."""
_PROBE_S = 1
_JITTER_S = 0.1  # tolerance for the age of an answer, which the kernel counts in ticks
_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_INFO")
_INFO = struct.Struct("=2x2B48x2I")
"""Fields of Linux's tcp_info: retransmissions and probes without an answer so far; milliseconds since the last data
arrived, and since the last acknowledgement."""


def probe_silence(connection: Any, lost_after_s: float) -> None:
    """Set TCP keepalive: the kernel probes a silent machine each second, and ends the connection if none is answered.

    The connection ends after ``lost_after_s``. While this end's data is unacknowledged, the kernel retransmits it
    instead of probing, and ends the connection later: use ``PeerSilence`` for this case. Do nothing for a Unix socket,
    or if the system lacks such options.
    """
    if connection.family == socket.AF_UNIX or not all(hasattr(socket, name) for name in _OPTIONS):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, math.ceil(lost_after_s / _PROBE_S))


class PeerSilence:
    """Measures how long the machine at the other end of ``connection`` has been silent."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._since: float | None = None  # by time.monotonic()

    def seconds(self) -> float:
        """Return how long a probe or data of this end has been unanswered; 0 if all is answered, or this is unknown.

        Call this about once a second. Silence counts from at most a second before the first call that finds no answer.
        """
        age_s, now = _unanswered_s(self._connection), time.monotonic()
        if age_s is None:
            self._since = None
            return 0.0
        if self._since is None or now - age_s > self._since + _JITTER_S:  # an answer came since: a new silence begins
            self._since = now - min(age_s, _PROBE_S)
        return now - self._since


def _unanswered_s(connection: Any) -> float | None:
    """Return the seconds since the peer's last answer; None if no retransmission or keepalive probe is unanswered."""
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
# Whether a machine is alive is asked of its kernel, not of lagom's processes on it. The kernel answers TCP keepalive
# probes at once, even while a rank computes without releasing the GIL, while a process is stopped or waits for a disk,
# and while a busy machine delays processes for seconds. Heartbeats of processes would report every busy host as gone.
# This machine's kernel knows when the last answer came, so a driver that could not run itself blames no other machine.
# The user is warned about a silent machine after 4 to 5 s. The run ends after 20 s, because networks recover by
# themselves from shorter interruptions, such as the restart of a switch or the move of a virtual machine.
#
# A machine whose process reads nothing, such as a driver under Ctrl-Z, answers probes too, but once its receive window
# is full the kernel probes it ever more rarely, at last every two minutes. A probe that has just been sent has no
# answer yet, and the last answer may be two minutes old. So silence counts from the probe, not from the last answer.
# TCP_USER_TIMEOUT would end such a connection, since its data does not get through.
