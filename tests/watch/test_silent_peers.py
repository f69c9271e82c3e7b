"""``lagom.watch.silent_peers``: connections with ranks whose machine no longer answers."""

from __future__ import annotations

import socket
import struct

import pytest

from lagom.watch.silent_peers import SilentPeers
from lagom.wire.messages import CutOff


class Connection:
    """A TCP connection as the kernel describes it."""

    family = socket.AF_INET

    def __init__(self, unanswered: int) -> None:
        self.unanswered = unanswered
        self.is_shut = False

    def setsockopt(self, *option: int) -> None:
        """Accept any option."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Return Linux's tcp_info with so many probes without an answer, and the last answer a minute ago."""
        return struct.pack("=2x2B48x2I", 0, self.unanswered, 60_000, 60_000)[:size]

    def shutdown(self, how: int) -> None:
        """Note the end."""
        self.is_shut = True


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not describe its connections")
def test_connections_with_a_silent_machine_are_told_and_ended_and_others_stay() -> None:
    answers, silent = Connection(0), Connection(2)
    peers = SilentPeers(lambda: [(1, answers), (2, silent)], 0.5)
    assert peers.look(1) == [CutOff(rank=1, peer=2, lost_s=0.5)]
    peers.end_lost()
    assert (answers.is_shut, silent.is_shut) == (False, True)
    silent.unanswered = 0
    assert peers.look(1) == []
