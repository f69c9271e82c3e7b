"""``SnapshotPace``: decides on rank 0 when the next snapshot is taken."""

from __future__ import annotations

import math
import resource
import time

SHARE = 0.01
"""Largest share of the run's time for rank 0's work up to its forks; with "auto", for the forks' own work too."""
_AUTO_S = 10.0
"""Shortest time between two snapshots with "auto"."""
_PUT_OFF_S = 0.02
"""Shortest time until the next try after a place at which no snapshot could be taken, in seconds."""


class SnapshotPace:
    """Plans the next snapshot by the time that the earlier ones have taken.

    Args:
        every_s: least number of seconds from one snapshot to the next; "auto": 10. Snapshots are further apart if rank
            0's work for them would take more than ``SHARE`` of the run's time. With "auto" the processor time of the
            process that writes, and that of the pages copied meanwhile, count as well.
    """

    def __init__(self, every_s: float | str) -> None:
        self._counts_all = every_s == "auto"
        self.every_s = _AUTO_S if isinstance(every_s, str) else every_s
        now = time.perf_counter()
        self._first_at = self.due_at = self.next_at = now + self.every_s
        """Times at which the first snapshot and the next one are due, and the time of the next look."""
        self.forked_at = 0.0
        self._forking_s, self._cost_s = 0.0, 0.0
        """Seconds that rank 0 spent on the last fork, and the cost of all snapshots."""
        self._rested_at, self._rested_system_s = now, _system_s()
        self._system_s, self._usual = 0.0, 0.0

    def put_off(self, seconds: float | None = None) -> bool:
        """Note that no snapshot could be taken; return whether the due one is late by ``every_s``.

        Args:
            seconds: the time that this has taken; None: the time of the fork, which has failed.
        """
        now = time.perf_counter()
        if seconds is None:
            seconds = self._forking_s + (now - self.forked_at if self._counts_all else 0.0)
        self.next_at = now + max(_PUT_OFF_S, seconds / SHARE)
        return now - self.due_at > self.every_s

    def fork(self, began: float) -> None:
        """Note a fork, which rank 0 had prepared since ``began``, by ``time.perf_counter``."""
        now = self.forked_at = time.perf_counter()
        self._forking_s = now - began
        self._cost_s += self._forking_s
        self._system_s = _system_s()
        self._usual = (self._system_s - self._rested_system_s) / max(now - self._rested_at, 1e-3)

    def written(self, used_s: float) -> None:
        """Note that the fork has written the snapshot, with ``used_s`` seconds of processor time."""
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

    @property
    def has_stopped(self) -> bool:
        """Return whether no snapshot is to be taken any more."""
        return self.next_at == math.inf

    def stop(self) -> None:
        """Take no snapshot any more."""
        self.next_at = math.inf


def _system_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime
