"""``SilentPeers``: notices that the network between this rank's host and the host of another rank is cut.

A rank that makes no progress is the subject of ``host/stall_detector.py``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Any

from lagom.wire.messages import CutOff
from lagom.wire.peer_silence import PeerSilence, probe_silence


class SilentPeers:
    """Measures for how long the machines at the other ends of this rank's connections have been silent.

    Args:
        connections: returns the open connections with ranks of other hosts, each with the number of that rank.
        lost_s: seconds of silence after which a connection is ended, as for the driver's connections.
    """

    def __init__(self, connections: Callable[[], Iterable[tuple[int, Any]]], lost_s: float) -> None:
        self._connections = connections
        self._lost_s = lost_s
        self._silences: dict[Any, PeerSilence] = {}

    def look(self, rank: int) -> list[CutOff]:
        """Return a message of ``rank``, the own one, about each machine that is lost; call this once a second."""
        there = {connection: peer for peer, connection in self._connections()}
        self._silences = {connection: one for connection, one in self._silences.items() if connection in there}
        lost = []
        for connection, peer in there.items():
            if connection not in self._silences:
                with contextlib.suppress(OSError):  # it has just been closed
                    probe_silence(connection, self._lost_s)
                self._silences[connection] = PeerSilence(connection)
            if self._silences[connection].seconds() >= self._lost_s:
                lost.append(CutOff(rank=rank, peer=peer, lost_s=self._lost_s))
        return lost

    def end_lost(self) -> None:
        """End the connections with lost machines, so that the rank does not wait for them any longer."""
        for connection, silence in self._silences.items():
            if silence.seconds() >= self._lost_s:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
