"""``TwinPace``: decides on rank 0 when the next twins are forked, so that they take 1% of the run's time."""

from __future__ import annotations

import math
import resource
import time
from typing import NamedTuple

SHARE = 0.01
"""Largest share of the run's time that forks take."""
_KEPT = 0.5
"""Part of the share that is kept for forks after a change of files, once there was one."""
_FIRST_S = 0.01
"""Time that the first fork is assumed to take, in seconds."""
MIN_S = 1.0
"""Shortest time between two forks that no change of files has asked for."""
_PUT_OFF_S = 1.0
"""Pause after a refused fork; four times as long after each further refusal."""
SETTLED = 2
"""Backwards after a fork, during which most pages that the rank writes are copied."""
_ENDS = 1.25
"""Cost of a fork, as a multiple of the cost that is counted: the twins before it end, which frees their pages."""
_ELSEWHERE_S = 0.02
"""Core time that the host process, the driver and the new twins take for a fork, in seconds, which nobody measures."""
_STRETCH_S = 0.5
"""Time by which the steps after a fork may be longer, since the forked processes need the cores, too."""
_TRIES = 5
"""Forks in a row that are refused, after which no more are tried."""
_TRIES_AT_PASSES = 16
"""Forks in a row that are refused where a pass begins, and are not put off: the next pass may begin without workers
of another one."""


class _Moment(NamedTuple):
    at: float
    num_backwards: int
    system_s: float
    """Time of the system for this process until then."""


class TwinPace:
    """Plans the next fork by the time that the forks so far have taken."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.next_at = self._began + _FIRST_S / SHARE
        """Time from which ``plans`` is to be called."""
        self._cost_s, self._last_s = 0.0, _FIRST_S
        self._settled_at = 0
        self._forked = _Moment(0.0, 0, 0.0)
        """The last fork."""
        self._rested = _Moment(self._began, 0, _system_s())
        """The moment at which the pages of the fork before it were copied; before the first fork the start."""
        self._num_refused = self._num_refused_at_passes = 0
        self._part = 1.0
        """Part of the share for forks that no change of files has asked for."""

    def plans(self, num_backwards: int, has_twins: bool) -> bool:
        """Return whether to fork after the next backward; plan ``next_at`` when the last fork's pages are copied."""
        now = time.perf_counter()
        if num_backwards < self._settled_at:
            return False
        if self._settled_at:
            moment = _Moment(now, num_backwards, _system_s())
            self._last_s = _ENDS * (self._last_s + self._copied_s(moment)) + _ELSEWHERE_S
            self._cost_s += self._last_s
            self._settled_at = 0
            self._rested = moment
            self.next_at = max(now + MIN_S, self._affordable(self._part)) if has_twins else self._affordable(1.0)
        if now < self.next_at:
            return False
        self.next_at = math.inf
        return True

    def hurry(self) -> None:
        """Fork as soon as it is affordable: a file has changed, and the twins are gone."""
        self._part = _KEPT
        if self._settled_at == 0:
            self.next_at = self._affordable(1.0)

    def fork(self, seconds: float, num_backwards: int) -> None:
        """Note a fork that took this rank ``seconds``; copies of pages come on top of that."""
        self._last_s = seconds
        self._num_refused = self._num_refused_at_passes = 0
        self._settled_at, self.next_at = num_backwards + SETTLED, 0.0
        self._forked = _Moment(time.perf_counter(), num_backwards, _system_s())

    def add(self, seconds: float) -> None:
        """Add the time that another process took for the last fork."""
        self._last_s += seconds
        if self._settled_at == 0:
            self._cost_s += seconds

    def refuse(self, seconds: float, begins_pass: bool = False) -> None:
        """Note that no twins could be forked.

        Args:
            seconds: the time that this took.
            begins_pass: whether a pass with workers begins here.
        """
        self._cost_s += seconds
        self._settled_at = 0
        if begins_pass and self._num_refused_at_passes < _TRIES_AT_PASSES:
            self._num_refused_at_passes += 1
            self.next_at = self._affordable(self._part)
            return
        self._num_refused += 1
        wait_s = _PUT_OFF_S * 4.0 ** (self._num_refused - 1) if self._num_refused < _TRIES else math.inf
        self.next_at = max(time.perf_counter() + wait_s, self._affordable(self._part))

    def _copied_s(self, now: _Moment) -> float:
        """Return the time of the system since the fork, without what the program takes anyway.

        That is as much for each backward as between the forks; or for each second, if an evaluation began meanwhile.
        """
        spent_s = now.system_s - self._forked.system_s
        before_s = max(0.0, self._forked.system_s - self._rested.system_s)  # a twin that goes on counts from 0
        num_before = self._forked.num_backwards - self._rested.num_backwards
        is_first = self._rested.num_backwards == 0  # then most of it was the start of the program, not its backwards
        by_backwards = 0.0 if is_first else (now.num_backwards - self._forked.num_backwards) / max(num_before, 1)
        by_seconds = (now.at - self._forked.at - _STRETCH_S) / max(self._forked.at - self._rested.at, 1e-3)
        return max(0.0, spent_s - before_s * max(by_backwards, by_seconds))

    def _affordable(self, part: float) -> float:
        """Return the time at which the forks so far are this ``part`` of the share of the run's time."""
        return self._began + self._cost_s / (SHARE * part)


def _system_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime
