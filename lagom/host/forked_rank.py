"""``ForkedRank``: a forked rank, as its host process sees it."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, field

from lagom.host.stall_detector import Pulse
from lagom.wire.client import DriverClient, LinkClosed, Message


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
    num_reports: int = 0
    """Number of reports that the rank has made for its trial so far."""
    tail: bytearray = field(default_factory=bytearray)
    report: Message | None = None
    ended: bool = False

    def send(self, message: Message) -> None:
        """Send ``message`` to the rank, unless it has ended."""
        with contextlib.suppress(LinkClosed, OSError):
            self.control.send(message)

    def close(self) -> None:
        """Close the connection and files of the rank, which has ended."""
        self._close_links()
        os.close(self.stacks)

    def _close_links(self) -> None:
        self.control.close()
        for fd in (self.stdout, self.stderr, self.pidfd):
            if fd is not None:
                os.close(fd)

    def wake(self, pid: int, bed: socket.socket, stall_timeout_s: float) -> None:
        """Have the sleeping twin ``pid``, at the other end of ``bed``, go on in place of the rank's ended process."""
        self._close_links()
        ours, theirs = socket.socketpair()
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        socket.send_fds(bed, [b"{}"], [theirs.fileno(), out, err])
        theirs.close()
        for fd in (out, err):
            os.close(fd)
        for fd in (self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self.pid, self.pidfd, self.control = pid, open_pidfd(pid), DriverClient(ours)
        self.pulse, self.tail = Pulse(stall_timeout_s), bytearray()
        self.report, self.ended = None, False


def open_pidfd(pid: int) -> int | None:
    """Return a file that is readable after the end of the child ``pid``; None if the system has no such files."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
