"""``RankSupervisor``: forwards the messages of a host's ranks to the driver, reports their ends, and ends them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Collection, Mapping

from lagom.host.descendants import end_rank, reap_adopted
from lagom.host.driver_link import DriverLink
from lagom.host.end_reports import called_exit, death_report, num_kills, stop_report
from lagom.host.forked_rank import ForkedRank, RankOutput
from lagom.host.stall_detector import Pulse, StallDetector
from lagom.plan import Plan
from lagom.watch.messages import Picture, Timeline
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.framing import Frame
from lagom.wire.messages import (
    CommonAnswer,
    CommonQuestion,
    Doing,
    Failed,
    ForRank,
    Hold,
    Log,
    Message,
    ProgressReport,
    RankReport,
    Started,
    Stop,
    Stopping,
)
from lagom.wire.rendezvous import LEAVE_S, WRITE_S
from lagom.wire.snapshot_messages import SigtermHeard, SnapshotMarked, SnapshotPoint, SnapshotWanted

_STOP_S = 1.0  # time for the driver to receive a failure
_CONSEQUENCE_S = 3.0  # time for another host to report the failure that caused a lost connection
_POLL_S = 0.02  # pause if the kernel does not report a child's end, or messages wait for a slow driver


class RankSupervisor:
    """Runs the event loop of a host process: passes messages between ranks and driver, and ends the ranks."""

    def __init__(self, link: DriverClient | None, plan: Plan) -> None:
        self._plan = plan
        self._ranks: list[ForkedRank] = []
        self.driver = DriverLink(link)
        self._selector = selectors.DefaultSelector()
        self._output = RankOutput(self.driver, plan, self._selector)
        self._stall_detector = StallDetector(self.driver, plan)
        self._deadline: float | None = None
        self._kept: Collection[int] = ()
        self._kills: Mapping[str, int] = {}
        self.unread: list[Message] = []
        """Messages of the driver that are not for the ranks."""
        self._is_held = False
        """Whether a rank of the run is in the debugger: then ranks make no progress and are not checked for stalls."""
        self._answers: list[CommonAnswer] = []
        """The driver's answers to the questions of all ranks, by number."""
        if link is not None:
            self._selector.register(link, selectors.EVENT_READ, lambda: self._read_driver(link))

    def hear(self, pipe: int, rank: ForkedRank | None = None) -> None:
        """Tell the driver when ``pipe`` says that ``rank``, or this process if that is None, has received SIGTERM."""

        def read() -> None:
            if not os.read(pipe, 1 << 16):
                self._selector.unregister(pipe)
            elif self.driver.is_open:
                self.driver.send(SigtermHeard(rank=None if rank is None else rank.rank), sure=True)
            elif rank is not None:
                os.kill(rank.pid, signal.SIGKILL)  # nobody is left who could wait for a snapshot

        self._selector.register(pipe, selectors.EVENT_READ, read)

    def add(self, rank: ForkedRank) -> None:
        """Supervise ``rank`` too."""
        self._ranks.append(rank)
        self._selector.register(rank.control, selectors.EVENT_READ, lambda: self._read_rank(rank))
        self._output.register(rank)
        if rank.sigterm is not None:
            self.hear(rank.sigterm, rank)
        if rank.pidfd is not None:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._reap(rank))

    def report_start(self) -> None:
        """Tell the driver the processes of the ranks."""
        self.driver.send(Started(pids={str(rank.rank): rank.pid for rank in self._ranks}))

    def supervise(self, kept: Collection[int] = ()) -> list[RankReport]:
        """Serve until every rank has ended, the driver says stop, or shortly after a failure; then end all ranks.

        All other children of this process belong to the ranks and end with them, except the processes in ``kept``. The
        only rank of a trial is killed once it has returned, and not awaited: the system takes 5 to 15 ms to free its
        memory. Return the reports in the order of the ranks.
        """
        self._kept, self._kills = kept, num_kills()
        for rank in self._ranks:
            rank.pulse = Pulse(self._plan.config.stall_timeout_s)
        while not all(rank.ended or called_exit(rank.report) or self._is_over(rank) for rank in self._ranks):
            if self._deadline is not None and time.monotonic() >= self._deadline:
                break
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self.driver.flush()
            reap_adopted([*(rank.pid for rank in self._ranks), *kept])
            self._stall_detector.skip_pause(self._ranks)
            for rank in self._ranks:
                if rank.pidfd is None and not rank.ended:
                    self._reap(rank)
                if rank.report is None and not self._is_held:
                    rank.report = self._stall_detector.check(rank)
                    if rank.report is not None:
                        self._tell_failure(rank)
        if self._is_over(self._ranks[0]):
            self._kill(self._ranks[0], self._kept)
            self._output.drain(self._ranks[0])
        else:
            self.end_all()
        return [rank.report or stop_report(rank.rank) for rank in self._ranks]

    def _is_over(self, rank: ForkedRank) -> bool:
        """Return whether ``rank`` is the only one of a trial and has returned, after which it only ends."""
        alone = self._plan.searches and len(self._ranks) == 1
        return alone and rank.report is not None and rank.report.ok

    def end_all(self) -> None:
        """End every rank with all its children, and read their last messages."""
        for rank in self._ranks:
            self._kill(rank, self._kept)
            if not rank.ended:
                with contextlib.suppress(ChildProcessError, ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)  # also where the kernel does not list children
                    os.waitpid(rank.pid, 0)
                rank.ended = True
            if rank.control.fileno() >= 0:
                self._drain(rank)
                rank.close()
        self._selector.close()

    def _patience(self) -> float | None:
        if any(rank.pidfd is None for rank in self._ranks) or self.driver.waiting():
            return _POLL_S
        ends = [] if self._deadline is None else [self._deadline]
        return max(0.0, min([self._stall_detector.interval_s, *(end - time.monotonic() for end in ends)]))

    def _read_driver(self, link: DriverClient) -> None:
        try:
            messages = link.poll()
        except LinkClosed:  # the driver has ended, or has given this process up
            self._selector.unregister(link)
            self.driver.give_up()
            self._deadline = 0.0
            return
        for message in messages:
            match message:
                case Stop():
                    self._deadline = 0.0
                    self.driver.send(Stopping())  # ranks may still have files to write, which takes a while
                case SnapshotWanted():
                    for rank in self._ranks:
                        rank.want_snapshot()
                case Hold():
                    self._is_held = message.on
                    for rank in self._ranks:
                        rank.pulse.moved()
                case ForRank():
                    for rank in self._ranks:
                        if rank.rank == message.rank:
                            rank.send(message)
                case CommonAnswer():
                    self._answers.append(message)
                    for rank in self._ranks:
                        if rank.num_questions == len(self._answers):
                            rank.send(message)
                case _:
                    self.unread.append(message)

    def _read_rank(self, rank: ForkedRank) -> None:
        try:
            frames = rank.control.poll_frames()
        except LinkClosed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.control)
            return
        for frame in frames:
            self._take(rank, frame)

    def _take(self, rank: ForkedRank, frame: Frame) -> None:
        """Handle a message of ``rank``, or pass its frame on to the driver as it is."""
        match message := frame.message:
            case ProgressReport():
                rank.pulse.heard(message.ticks)
                self.driver.send(frame.body)
            case RankReport():
                rank.report = message
                if not message.ok:
                    self._tell_failure(rank)
                elif message.ends_others:
                    self._end_within(LEAVE_S)
            case Doing():
                rank.pulse.doing = message
            case CommonQuestion():
                self._take_question(rank, frame)
            case Log():
                self._output.drain(rank)  # printed before this message
                self._output.forward(rank, message.stream, message.data)
            case SnapshotPoint():
                self._output.mark(self._ranks, message.number)
                rank.send(SnapshotMarked())  # rank 0 waits for this
            case Timeline() | Picture():
                self.driver.send_block(message)
            case _:
                self._pass_on(rank, frame)

    def _take_question(self, rank: ForkedRank, frame: Frame) -> None:
        """Send rank 0's question to the driver; another rank's n-th question gets the answer to rank 0's n-th."""
        rank.pulse.moved()
        rank.num_questions += 1
        if rank.rank == 0:
            self.driver.send(frame.body, sure=True)
        elif len(self._answers) >= rank.num_questions:
            rank.send(self._answers[rank.num_questions - 1])

    def _pass_on(self, rank: ForkedRank, frame: Frame) -> None:
        """Pass on a message of ``rank`` that only the driver handles."""
        message = frame.message
        if message.follows_output:
            self._output.drain(rank)
        self.driver.send(frame.body, sure=message.is_sure)
        if not self.driver.is_open and (answer := message.unreachable()) is not None:
            rank.send(answer)

    def _reap(self, rank: ForkedRank) -> None:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid == 0:
            return
        rank.ended = True
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
        self._drain(rank)
        if rank.report is None:
            rank.report = death_report(rank.rank, status, bytes(rank.tail), self._kills)
            self._tell_failure(rank)
        self._kill(rank, self._kept)  # end the processes that the rank left behind

    def _kill(self, rank: ForkedRank, kept: Collection[int]) -> None:
        """End ``rank`` and the processes that it started, but not the other ranks nor the processes ``kept``."""
        others = [other.pid for other in self._ranks if not other.ended and other is not rank]
        end_rank(rank.pid, others, kept)

    def _drain(self, rank: ForkedRank) -> None:
        with contextlib.suppress(OSError):
            if rank.report is None:
                self._read_rank(rank)
        self._output.drain(rank)

    def _tell_failure(self, rank: ForkedRank) -> None:
        assert rank.report is not None
        consequence = rank.report.consequence
        if called_exit(rank.report):
            self._end_within(LEAVE_S)
            return
        if not consequence:
            self._drain(rank)
            self.driver.send(Failed(report=rank.report), sure=True)
        alone = WRITE_S if rank.rank != 0 and not rank.report.died else 0.0
        heard = self.driver.is_open and not self._plan.searches  # all ranks of a trial are here
        self._end_within(_CONSEQUENCE_S if consequence else (_STOP_S if heard else alone))

    def _end_within(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
