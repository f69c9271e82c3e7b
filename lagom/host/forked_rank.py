"""``ForkedRank`` and ``RankOutput``: a forked rank, as its host process sees it, and what it prints."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterable
from dataclasses import dataclass, field

from lagom.host.driver_link import DriverLink
from lagom.host.stall_detector import Pulse
from lagom.plan import Plan
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Log, Message, RankReport
from lagom.wire.snapshot_messages import OutputMark


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
    notice: int | None = None
    """File by which the rank learns that the driver wants a snapshot; None if the rank takes none."""
    pulse: Pulse = field(init=False)
    sigterm: int | None = None
    """Pipe from which the host process reads that the rank has received SIGTERM; None if SIGTERM ends the rank."""
    num_wanted: int = 0
    """Number of snapshots that the driver has wanted."""
    num_questions: int = 0
    """Number of reports that the rank has made for its trial so far."""
    tail: bytearray = field(default_factory=bytearray)
    report: RankReport | None = None
    ended: bool = False

    def send(self, message: Message) -> None:
        """Send ``message`` to the rank, unless it has ended."""
        with contextlib.suppress(LinkClosed, OSError):
            self.control.send(message)

    def want_snapshot(self) -> None:
        """Have the rank take a snapshot at the next batch."""
        if self.notice is not None:
            self.num_wanted = (self.num_wanted + 1) % 256
            os.pwrite(self.notice, bytes([self.num_wanted]), 0)

    def close(self) -> None:
        """Close the connection and files of the rank, which has ended."""
        self.control.close()
        for fd in (self.stdout, self.stderr, self.pidfd, self.stacks, self.notice, self.sigterm):
            if fd is not None:
                os.close(fd)


def open_pidfd(pid: int) -> int | None:
    """Return a file that is readable after the end of the child ``pid``; None if the system has no such files."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


_TAIL = 8192  # bytes of a rank's last output in the report of its death


class RankOutput:
    """Forwards rank 0's output, and that of the other ranks if the run keeps logs."""

    def __init__(self, driver: DriverLink, plan: Plan, selector: selectors.BaseSelector) -> None:
        self._driver, self._plan, self._selector = driver, plan, selector

    def register(self, rank: ForkedRank) -> None:
        """Read the output of ``rank`` whenever the selector finds some."""
        self._selector.register(rank.stdout, selectors.EVENT_READ, lambda: self._read(rank, "stdout"))
        self._selector.register(rank.stderr, selectors.EVENT_READ, lambda: self._read(rank, "stderr"))

    def drain(self, rank: ForkedRank) -> None:
        """Read and forward all that ``rank`` has printed so far."""
        for stream in ("stdout", "stderr"):
            with contextlib.suppress(OSError):
                while self._read(rank, stream):
                    pass

    def mark(self, ranks: Iterable[ForkedRank], number: int) -> None:
        """Forward the output of ``ranks``, then have the driver set mark ``number``."""
        for rank in ranks:
            self.drain(rank)
        self._driver.send(OutputMark(number=number), sure=True)

    def forward(self, rank: ForkedRank, stream: str, data: str) -> None:
        """Send ``data``, one character a byte, to the driver as output of ``rank``."""
        if rank.rank == 0:
            self._driver.show(stream, data)
        elif self._plan.keeps_logs:
            self._driver.send(Log(rank=rank.rank, stream=stream, data=data))

    def _read(self, rank: ForkedRank, stream: str) -> bool:
        """Forward a piece of output; return whether there was one."""
        fd = rank.stdout if stream == "stdout" else rank.stderr
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
            return False
        rank.tail = (rank.tail + data)[-_TAIL:]
        rank.pulse.moved()
        # latin-1 keeps every byte, also of a character that the read has cut in two.
        self.forward(rank, stream, data.decode("latin-1"))
        return True
