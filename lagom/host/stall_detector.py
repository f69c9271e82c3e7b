"""``StallDetector``: notices ranks of this host that make no progress, reports them, and fails them after the timeout.

A rank reports its progress and its current work (``on_rank/heartbeat.py``). If it cannot, as when C code keeps the
GIL, this process reads its stack from outside. ``watch/stall_texts.py`` has the texts, and
``driver/run_display.py`` shows them.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lagom.on_rank import stack_dump
from lagom.wire.messages import Doing, RankReport, Stalled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.host.driver_link import DriverLink
    from lagom.host.forked_rank import ForkedRank
    from lagom.plan import Plan


class StallDetector:
    """Compares the time since the last progress of each rank with ``stall_timeout_s`` and ``timeout_s``."""

    def __init__(self, driver: DriverLink, plan: Plan) -> None:
        self._driver, self._plan = driver, plan
        self.interval_s = min(
            [plan.config.stall_timeout_s / 4, *([plan.config.timeout_s / 4] if plan.config.timeout_s else []), 1.0]
        )
        """Longest time between two checks."""
        self._looked_at = time.monotonic()

    def skip_pause(self, ranks: Sequence[ForkedRank]) -> None:
        """Call this before each round of checks: if this process was stopped, do not count that time for ``ranks``."""
        now = time.monotonic()
        pause_s, self._looked_at = now - self._looked_at - self.interval_s, now
        if pause_s > self.interval_s:
            for rank in ranks:
                rank.pulse.skip(pause_s)

    def check(self, rank: ForkedRank) -> RankReport | None:
        """Tell the driver once that ``rank`` stalls; return the rank's failure after ``timeout_s`` without progress."""
        pulse, quiet_s = rank.pulse, rank.pulse.quiet_s
        is_over = self._plan.config.timeout_s is not None and quiet_s >= self._plan.config.timeout_s
        if not is_over and (pulse.is_stalled or quiet_s < pulse.patience_s):
            return None
        work = current_work(rank, 2 * self.interval_s + self._plan.config.hb_interval)
        from lagom.watch.stall_texts import stall_report, stall_text  # most runs never stall

        stall = Stalled(rank=rank.rank, quiet_s=quiet_s, work=work)
        if not pulse.is_stalled:
            pulse.is_stalled = True
            if self._driver.is_open:
                self._driver.send(stall)
            else:
                self._driver.say(f"[lagom] {stall_text({rank.rank: stall}, self._plan.world_size)}\n")
        return stall_report(stall) if is_over else None


@dataclass(slots=True)
class Pulse:
    """The time of a rank's last progress: new ticks in its heartbeat, output, or a report of a trial.

    ``quiet_s`` decides whether a rank stalls; ``RankSupervisor`` does not check while a rank of the run is in the
    debugger. A rank counts its ticks (batches, forwards, backwards) in ``RunProgress.ticks``; ``heartbeat.py`` sends
    them.
    """

    patience_s: float
    """Seconds without progress after which the rank counts as stalled."""
    ticks: int = -1
    moved_at: float = field(default_factory=time.monotonic)
    heard_at: float = field(default_factory=time.monotonic)
    doing: Doing | None = None
    """The rank's last message about its current work."""
    is_stalled: bool = False

    def heard(self, ticks: int) -> None:
        """Take in a message of the rank, with its progress counter."""
        self.heard_at = time.monotonic()
        if ticks != self.ticks:
            self.ticks = ticks
            self.moved()

    def skip(self, seconds: float) -> None:
        """Do not count ``seconds``, in which the host process itself was stopped, or the machine asleep."""
        now = time.monotonic()
        self.moved_at, self.heard_at = (min(now, then + seconds) for then in (self.moved_at, self.heard_at))

    def moved(self) -> None:
        """Record progress."""
        now = time.monotonic()
        if self.is_stalled:
            # The rank is just slow: a report at each of its steps would help nobody.
            self.patience_s = max(self.patience_s, 2 * (now - self.moved_at))
            self.is_stalled = False
        self.moved_at, self.doing = now, None

    @property
    def quiet_s(self) -> float:
        """Seconds without progress, which ``StallDetector.check`` compares with the limits."""
        return time.monotonic() - self.moved_at


def current_work(rank: ForkedRank, heard_within_s: float) -> Doing:
    """Return the current work of ``rank``: its last message about it, if the rank spoke within ``heard_within_s``.

    Otherwise the stack is read from outside; it is empty if the process is stopped, or does not answer the signal.
    """
    state = stack_dump.state(rank.pid)
    if rank.pulse.doing is not None and time.monotonic() - rank.pulse.heard_at < heard_within_s:
        return dataclasses.replace(rank.pulse.doing, state=state)
    stack = "" if state else stack_dump.read_stack(rank.pid, rank.stacks)
    return Doing(stack=stack, line="", waits=False, state=state)
