"""``ForkedRank``: a forked rank, as its host process sees it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from lagom.host.stall_detector import Pulse
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Message, RankReport


@dataclass(slots=True)
class ForkedRank:
    """A forked rank as its host process has it: process, connection, output and last progress."""

    rank: int
    pid: int
    pidfd: int | None
    control: DriverClient
    stdout: int
    stderr: int
    stacks: int
    """File for the stacks of the rank and of the processes that it started."""
    pulse: Pulse = field(init=False)
    num_questions: int = 0
    """Number of reports that the rank has made for its trial so far."""
    tail: bytearray = field(default_factory=bytearray)
    report: RankReport | None = None
    ended: bool = False

    def send(self, message: Message) -> None:
        """Send ``message`` to the rank, unless it has ended."""
        with contextlib.suppress(LinkClosed, OSError):
            self.control.send(message)

    def close(self) -> None:
        """Close the connection and files of the rank, which has ended."""
        self.control.close()
        for fd in (self.stdout, self.stderr, self.pidfd, self.stacks):
            if fd is not None:
                os.close(fd)


def open_pidfd(pid: int) -> int | None:
    """Return a file that is readable after the end of the child ``pid``; None if the system has no such files."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
