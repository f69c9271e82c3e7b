"""``RehearsedSnapshot``: takes one snapshot in a rehearsal, from which the next rehearsal goes on."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from lagom.extensions.resume.snapshot_taker import Snapshots
from lagom.wire.snapshot_messages import NoSnapshot, SnapshotKept

if TYPE_CHECKING:
    from lagom.extensions.resume.snapshot_files import SnapshotFiles
    from lagom.session.session import Session

_PATIENCE_S = 60.0
"""Seconds spent on attempts after which none follows: a large state mostly fails again for the same reason."""
_LOOK_S = 0.01


class RehearsedSnapshot(Snapshots):
    """The snapshot of a rehearsal, at the first possible batch after some backwards; rank 0 waits until it is written.

    Args:
        others: the other arguments of ``Snapshots``, from ``ask`` on.
    """

    def __init__(self, session: Session, files: SnapshotFiles, payload_fd: int, *others: Any) -> None:
        super().__init__(session, files, payload_fd, self._hear, *others)
        rehearsal = session.plan.rehearsal
        assert rehearsal is not None
        self._rehearsal = rehearsal
        self._is_over = session.rank != 0 or rehearsal.snapshot_after is None
        self._spent_s = 0.0
        self.num_before = 0
        """Number of backwards before the snapshot; 0 without one."""
        self._reasons: Counter[str] = Counter()

    @property
    def without(self) -> str:
        """Return the most frequent reason for which a due snapshot could not be taken; empty if there was none."""
        return next((why for why, _ in self._reasons.most_common(1)), "")

    @property
    def journal(self) -> str | None:
        """Return None: a rehearsal keeps no journal of calls to services for the rehearsal that goes on from it."""
        return None

    def point(self, iterator: Any) -> None:
        """Take the snapshot if it is due, and wait until it is written."""
        if self._is_over or not self._is_due(iterator):
            return
        start, self._pace.next_at = time.perf_counter(), 0.0
        try:
            super().point(iterator)
        except OSError as error:
            self._put_off(f"the program's files cannot be copied: {error}", 0.0)
        while self._child is not None:
            time.sleep(_LOOK_S)
            self._look()
        self._spent_s += time.perf_counter() - start
        self._is_over = self._is_over or self._spent_s > _PATIENCE_S

    def _is_due(self, iterator: Any) -> bool:
        """Return whether enough backwards have run; see Note [Passes that go on]."""
        now, rehearsal = self._session.parts["verify"].num_backwards, self._rehearsal
        if rehearsal.snapshot_after is None or now < rehearsal.snapshot_after:
            return False
        is_between = not iterator._num_yielded and not self._session.passes.trains()
        return now < rehearsal.num_in_long_passes or is_between

    def _put_off(self, why: str, seconds: float | None = None) -> None:
        self._reasons[why] += 1

    def _hear(self, message: NoSnapshot | SnapshotKept) -> None:
        """Note that the snapshot is written, or why there can be none on this host."""
        self._is_over = True
        if isinstance(message, NoSnapshot):
            self._reasons[message.why] += 1
        else:
            self.num_before = self._session.parts["verify"].num_backwards


# Note [Passes that go on]
#
# The number of backwards before a pass decides how long the pass is in a rehearsal (truncate.py). A process that goes
# on from a snapshot begins a pass in progress again, with the number of backwards at the snapshot
# (Rehearsal.num_before). So the snapshot is taken while all passes are long ones; or later, before the first batch of a
# pass, if no training pass is in progress.
