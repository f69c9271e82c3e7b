"""``ForkedRank``: a forked rank, as its host process sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field

from lagom.monitor.stalls import Pulse
from lagom.wire.client import DriverClient, Message
from lagom.worker import stack_dump


@dataclass(slots=True)
class ForkedRank:
    """A forked rank, as its host process sees it."""

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
    """Reports of a trial so far."""
    tail: bytearray = field(default_factory=bytearray)
    report: Message | None = None
    ended: bool = False

    def current_work(self, heard_within_s: float) -> Message:
        """Return what the rank does now: what it has said of itself, if that was within ``heard_within_s``.

        Otherwise, as when C code keeps the GIL, it is the rank's stack, read from outside.
        """
        state = stack_dump.state(self.pid)
        if self.pulse.doing is not None and time.monotonic() - self.pulse.heard_at < heard_within_s:
            return {**self.pulse.doing, "state": state}
        stack = "" if state else stack_dump.read_stack(self.pid, self.stacks)
        return {"stack": stack, "line": "", "waits": False, "state": state}

    def wake(self, pid: int, bed: socket.socket, stall_timeout_s: float) -> None:
        """Have the sleeping twin ``pid`` go on in place of the rank's process, which has ended."""
        self.control.close()
        for fd in (self.stdout, self.stderr, self.pidfd):
            if fd is not None:
                os.close(fd)
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
