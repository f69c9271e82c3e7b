"""``lagom.host.stall_detector``: when a rank counts as stalled, and what its host process sends then."""

from __future__ import annotations

import os
import socket
import time

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.host.driver_link import DriverLink
from lagom.host.forked_rank import ForkedRank
from lagom.host.stall_detector import Pulse, StallDetector
from lagom.plan import plan
from lagom.wire.client import DriverClient
from lagom.wire.messages import Doing, Message, Stalled


class Link(DriverLink):
    """An open link that keeps what it sends."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sent: list[Message | bytes] = []

    @property
    def is_open(self) -> bool:
        return True

    def send(self, message: Message | bytes, sure: bool = False) -> None:
        self.sent.append(message)


def test_a_stall_is_sent_once_and_fails_the_rank_after_the_timeout() -> None:
    config = TorchDistributedConfig(world_size=2, stall_timeout_s=10.0, timeout_s=100.0)
    link = Link()
    detector = StallDetector(link, plan(config, Cluster(launcher="spark", slots=2)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank = ForkedRank(1, os.getpid(), None, DriverClient(ours), -1, -1, -1)
        rank.pulse = Pulse(patience_s=10.0)
        assert (detector.check(rank), link.sent) == (None, [])
        rank.pulse.moved_at -= 20.0
        rank.pulse.doing = Doing(line="a.py:3, in load: read()", waits=False, stack="  File ...\n")
        assert detector.check(rank) is None
        assert detector.check(rank) is None
        (stalled,) = link.sent
        assert isinstance(stalled, Stalled)
        assert (stalled.rank, stalled.work.line) == (1, "a.py:3, in load: read()")
        rank.pulse.moved_at -= 90.0
        report = detector.check(rank)
        assert report is not None
        assert (report.error, report.consequence) == ("StallError", False)
        assert "made no progress for 110 s, at a.py:3, in load: read()" in report.message
        assert len(link.sent) == 1


def test_the_time_for_which_the_host_process_was_stopped_does_not_count() -> None:
    config = TorchDistributedConfig(world_size=2, stall_timeout_s=10.0, timeout_s=100.0)
    link = Link()
    detector = StallDetector(link, plan(config, Cluster(launcher="spark", slots=2)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank = ForkedRank(1, os.getpid(), None, DriverClient(ours), -1, -1, -1)
        rank.pulse = Pulse(patience_s=0.4)
        detector.interval_s = 0.01
        detector.skip_pause([rank])
        time.sleep(0.5)  # as after a SIGSTOP and a SIGCONT
        detector.skip_pause([rank])
        assert (detector.check(rank), link.sent) == (None, [])
        rank.pulse.moved_at -= 200.0  # while this process has looked
        detector.skip_pause([rank])
        assert detector.check(rank) is not None


def test_one_that_is_always_slow_is_named_once() -> None:
    pulse = Pulse(patience_s=1.0)
    pulse.moved_at -= 5.0
    pulse.is_stalled = True
    pulse.heard(1)
    assert not pulse.is_stalled
    assert pulse.patience_s >= 10.0
    pulse.moved_at -= 6.0
    assert pulse.quiet_s < pulse.patience_s
