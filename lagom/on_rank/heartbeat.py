"""``Heartbeat``: a thread that reports the rank's progress to the host process, and the stack of a stuck rank.

``RunProgress.ticks`` counts progress. Only the host process decides, by these ticks, whether the rank stalls: see
``Pulse`` in ``host/stall_detector.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from typing import TYPE_CHECKING

from lagom.on_rank import stack_dump
from lagom.on_rank.resource_usage import ResourceUsage, processor_s_below
from lagom.watch.messages import Picture
from lagom.wire.messages import Doing, Message, ProgressReport, RankReport
from lagom.wire.peer_silence import LOST_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lagom.plan import Plan
    from lagom.session.session import Session
    from lagom.watch.messages import Timeline
    from lagom.watch.silent_peers import SilentPeers
    from lagom.wire.client import DriverClient


_ANSWER_S = 60.0
_WORTH = 0.005
"""Smallest wait for another rank, as a share of the time, that is reported."""
_COMPUTING = 0.05
"""CPU time of child processes, as a share of the time, above which a program that waits for them makes progress."""


class Heartbeat:
    """Reports every ``hb_interval`` seconds, or four times in each ``stall_timeout_s`` if this is more often.

    Args:
        control: connection to the host process.
        stacks_fd: file for the stacks of processes that the rank has started.
    """

    def __init__(self, control: DriverClient, plan: Plan, stacks_fd: int | None) -> None:
        self._control = control
        self._stall_s = plan.config.stall_timeout_s
        self._lost_s = min(LOST_S, plan.config.timeout_s or LOST_S)
        self._silent_peers: SilentPeers | None = None
        """Watches the connections with ranks of other hosts; None if there are none."""
        self._interval_s = min(plan.config.hb_interval, plan.config.stall_timeout_s / 4)
        self._stacks_fd = stacks_fd
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._thread = threading.get_ident()
        self._at: tuple[int, int] | None = None
        self._since = 0.0
        self._last = (0.0, 0.0, 0.0)
        self._earlier: tuple[tuple[float, float, float], list[int]] = self._last, []
        self._begun = (-1.0, 0.0, 0.0)
        self._steps_s = 0.0
        self._children: str | None = None
        self._waited: list[int] = []
        self._below = (0.0, 0.0)
        self._usage: ResourceUsage | None = None

    def beat_for(self, session: Session) -> None:
        """Begin to report on ``session``."""
        self._session = session
        self._last = (time.monotonic(), 0.0, 0.0)
        self._earlier = self._last, []
        self._usage = ResourceUsage(str(session.device))
        if session.local_world_size < session.world_size:
            from lagom.exchange.sockets.connect import remote_connections
            from lagom.watch.silent_peers import SilentPeers

            self._silent_peers = SilentPeers(remote_connections, self._lost_s)
        threading.Thread(target=self._beat, name="lagom-heart", daemon=True).start()

    def send_outcome(self, report: RankReport) -> None:
        """Report the final progress, then the outcome ``report``."""
        with self._lock, contextlib.suppress(OSError):
            if self._session is not None:
                self._control.send(self._last_progress(self._session))
                for block in (*_timeline(self._session), *_pictures(self._session)):
                    self._control.send(block)
            self._control.send(report)

    def ask(self, message: Message) -> Message:
        """Send ``message``, and wait for the driver's answer.

        Raises:
            LinkClosed: if the host process has ended.
        """
        with self._lock:
            self._control.send(message)
        while (answer := self._control.receive(_ANSWER_S)) is None:
            pass
        return answer

    def tell(self, message: Message) -> None:
        """Send ``message`` to the driver at once; drop it if the connection is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._control.send(message)

    def _beat(self) -> None:
        assert self._session is not None
        pause = threading.Event()
        while not pause.wait(self._interval_s):
            if not self._report(self._session):
                return

    def _report(self, session: Session) -> bool:
        """Report once; return whether the connection still exists."""
        self._count_progress(session)
        doing = self._doing() if self._quiet_s >= self._stall_s / 2 else None
        with self._lock:
            try:
                if doing is not None:
                    self._control.offer(doing)
                self._control.offer(self._progress(session))
                for block in (*_timeline(session), *_pictures(session)):
                    self._control.offer(block)
                for lost in self._silent_peers.look(session.rank) if self._silent_peers is not None else ():
                    self._control.send(lost)
            except OSError:
                return False
        if self._silent_peers is not None:
            self._silent_peers.end_lost()  # after the message: the errors that follow are its consequence
        return True

    def _last_progress(self, session: Session) -> ProgressReport:
        """Return the rank's last report; if the one before has just been sent, its means include the time before that.

        A mean over the end of the program alone would look as if the training had become slow.
        """
        if time.monotonic() - self._last[0] < self._interval_s / 2:
            self._last, self._waited = self._earlier
        return self._progress(session)

    def _progress(self, session: Session) -> ProgressReport:
        now, progress, data_s = time.monotonic(), session.progress.report(), session.progress.data_s
        samples = progress["samples"]
        before, samples_before, data_before = self._last
        passed = max(now - before, 1e-3)
        self._earlier = self._last, self._waited
        self._last = now, samples, data_s
        waits, waits_for = self._waits(session, passed)
        return ProgressReport(
            **progress,
            **(self._usage.now() if self._usage is not None else {}),
            rank=session.rank,
            rate=round((samples - samples_before) / passed, 1),
            steps_s=self._speed(now, progress["epoch"] or 0, progress["step"] or 0),
            data=round(min(1.0, (data_s - data_before) / passed), 3),
            waits=waits,
            waits_for=waits_for,
        )

    def _waits(self, session: Session, passed: float) -> tuple[float, dict[str, float]]:
        """Return the time that the rank waited in exchanges, as a share of ``passed``: in all, and for each rank."""
        waited = session.wait_times()
        before = self._waited if len(self._waited) == len(waited) else [0] * len(waited)
        self._waited = waited
        shares = [(now - then) / 1e9 / passed for now, then in zip(waited, before, strict=True)]
        waits_for = {str(rank): round(min(1.0, share), 3) for rank, share in enumerate(shares) if share >= _WORTH}
        return round(min(1.0, sum(shares)), 3), waits_for

    def _speed(self, now: float, epoch: float, step: float) -> float:
        """Return the steps per second since the first report of this epoch.

        Until there is a second report, the value is that of the epoch before.
        """
        if epoch != self._begun[0]:
            self._begun = epoch, now, step
        elif now > self._begun[1] and step > self._begun[2]:
            self._steps_s = round((step - self._begun[2]) / (now - self._begun[1]), 4)
        return self._steps_s

    def _count_progress(self, session: Session) -> None:
        """Note the time of new ticks, and count a tick for progress that the patches do not see.

        The patches see no progress of a program with its own process group, nor of child processes that compute while
        the program waits for them.
        """
        # The patches count no ticks for a program with its own process group: a new position in its code is progress.
        place = stack_dump.position(stack_dump.of_thread(self._thread)) if session.has_joined else 0
        now = time.monotonic()
        if now - self._since >= self._stall_s / 4:
            session.progress.ticks += self._children_get_on(now)
        if (session.progress.ticks, place) != self._at:
            session.progress.ticks += session.has_joined
            self._at, self._since, self._children = (session.progress.ticks, place), now, None

    @property
    def _quiet_s(self) -> float:
        """Seconds without progress. They decide when the stack is sent to the host, not whether the rank stalls."""
        return time.monotonic() - self._since

    def _children_get_on(self, now: float) -> bool:
        """Return whether the program waits for processes that it has started, while they use CPU time."""
        if not stack_dump.waits_for_process(stack_dump.of_thread(self._thread)):
            return False
        (before, used_before), used_s = self._below, processor_s_below(os.getpid())
        self._below = now, used_s
        return bool(before) and used_s - used_before > _COMPUTING * (now - before)

    def _doing(self) -> Doing:
        doing = stack_dump.doing(stack_dump.of_thread(self._thread))
        if doing.waits and self._session is not None:
            words, number, missing = self._session.waiting_exchange()
            doing = dataclasses.replace(doing, exchange=words, number=number, missing=missing)
        if self._children is None and self._stacks_fd is not None:
            self._children = "" if doing.waits else stack_dump.of_children(self._stacks_fd)
        return dataclasses.replace(doing, children=self._children or "")


def _timeline(session: Session) -> Iterable[Timeline]:
    return session.spans.blocks() if session.spans is not None else ()


def _pictures(session: Session) -> Iterable[Picture]:
    while session.progress.pictures:
        yield Picture(rank=session.rank, png=session.progress.pictures.popleft())
