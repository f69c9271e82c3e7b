"""``SnapshotPace``: decides on rank 0 when the next snapshot is taken."""

from __future__ import annotations

import math
import resource
import time

SHARE = 0.01
"""Largest share of the run's time that rank 0 may spend until it has forked; with "auto", that all may take."""
_AUTO_S = 10.0
"""Shortest time between two snapshots with "auto"."""
_PUT_OFF_S = 0.02
"""Time until the next look after a place at which no snapshot could be taken."""


class SnapshotPace:
    """Plans the next snapshot by the time that the earlier ones have taken.

    Args:
        every_s: seconds from one to the next, at least. "auto": 10, or as many more as it takes for the time of rank 0,
            of the process that writes and of the pages that are copied meanwhile to be 1% of the run's.
    """

    def __init__(self, every_s: float | str) -> None:
        self._counts_all = every_s == "auto"
        self.every_s = _AUTO_S if isinstance(every_s, str) else every_s
        now = time.perf_counter()
        self._first_at = self.due_at = self.next_at = now + self.every_s
        """Times at which the first snapshot and the next one are due, and the time of the next look."""
        self.forked_at = 0.0
        self._cost_s = 0.0
        self._rested_at, self._rested_system_s = now, _system_s()
        self._system_s, self._usual = 0.0, 0.0

    def put_off(self, seconds: float | None = None) -> bool:
        """Note that no snapshot could be taken; return whether the due one is late by ``every_s``.

        Args:
            seconds: the time that this has taken; None if a fork failed, whose time counts already.
        """
        now = time.perf_counter()
        paid_at = self._first_at + self._cost_s / SHARE if seconds is None else now + seconds / SHARE
        self.next_at = max(now + _PUT_OFF_S, paid_at)
        return now - self.due_at > self.every_s

    def fork(self, began: float) -> None:
        """Note a fork, which rank 0 had prepared since ``began``."""
        now = self.forked_at = time.perf_counter()
        self._cost_s += now - began
        self._system_s = _system_s()
        self._usual = (self._system_s - self._rested_system_s) / max(now - self._rested_at, 1e-3)

    def written(self, used_s: float) -> None:
        """Note that the fork has written the snapshot, which took it ``used_s`` of a core."""
        now = time.perf_counter()
        wrote_s = now - self.forked_at
        if self._counts_all:
            # Copies of pages count as time of the system, of which this process uses some anyway.
            self._cost_s += used_s + max(0.0, _system_s() - self._system_s - self._usual * wrote_s)
        paused_at = now + wrote_s  # at least as long a pause as the writing took
        self.due_at = self.next_at = max(
            self.forked_at + self.every_s, paused_at, self._first_at + self._cost_s / SHARE
        )
        self._rested_at, self._rested_system_s = now, _system_s()

    def stop(self) -> None:
        """Take no snapshot any more."""
        self.next_at = math.inf


def _system_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime
