"""``Departure``: the end of an attempt that lagom itself brings about, after a last snapshot. See Note [Departures]."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from lagom.restart.history import RunHistory
from lagom.restart.losses import Loss
from lagom.wire.server import DriverServer
from lagom.wire.snapshot_messages import LEAVE_SNAPSHOT_S, SnapshotKept, SnapshotWanted


class Departure:
    """Wants a last snapshot of an attempt, and ends the attempt when the snapshot is in its place.

    Args:
        end: ends the attempt with the given loss, unless it has ended; called in the channel's thread.
        warn: shows a text to the user.
    """

    def __init__(
        self, channel: DriverServer, history: RunHistory, end: Callable[[Loss], None], warn: Callable[[str], None]
    ) -> None:
        self._channel, self._history, self._end, self._warn = channel, history, end, warn
        self.is_terminated = False
        """Whether the driver itself has received SIGTERM, which ends the run."""
        self._notice: Loss | None = None
        """The loss that has been announced, if any."""
        self._has_to_end = False
        """Whether the attempt ends also without room elsewhere, as processes of it have received SIGTERM."""
        self._awaits_room = False
        self._is_kept = threading.Event()
        """Set when ``leave`` need not wait any longer for a snapshot."""
        self._wanted_number = -1
        """Number of the last snapshot that rank 0 has taken because it was wanted."""
        self._num_older = 0
        """Most snapshots that can still arrive though they were taken before the notice."""

    def leave(self, *, has_ranks: bool) -> None:
        """Have rank 0 take a snapshot at the next batch, and wait until it is kept; for any thread."""
        self.is_terminated = True
        if self._history.folder is not None and has_ranks:
            self._channel.broadcast(SnapshotWanted())
            self._is_kept.wait(LEAVE_SNAPSHOT_S)

    def release(self) -> None:
        """End the wait of ``leave``."""
        self._is_kept.set()

    def announce(self, loss: Loss, within_s: float | None = None) -> None:
        """Have rank 0 take a snapshot at the next batch, since ``loss`` is about to happen; in the channel's thread.

        Args:
            within_s: seconds after which the attempt ends also without a snapshot, since processes have to end; None if
                the attempt may go on as long as there is none, or no room elsewhere. Only such a notice may follow
                another one, and replaces it.
        """
        has_to_end = within_s is not None
        if self.is_terminated or (self._notice is not None and self._has_to_end >= has_to_end):
            return
        if self._history.folder is None:
            if within_s is not None:
                self._end(loss)
            else:
                self._warn(
                    f"{loss.cause}; the run goes on there, and keeps no snapshot (snapshot_every_s): if Spark "
                    "ends the executor before the run has returned, the run restarts from the beginning"
                )
            return
        self._notice, self._has_to_end = loss, has_to_end
        self._num_older = int(self._history.ranks_began_at is not None)
        self._channel.broadcast(SnapshotWanted())
        if within_s is not None:
            self._channel.call_later(within_s, partial(self._end_without, loss))

    def ranks_began(self) -> None:
        """Want the snapshot of a notice that came before there were ranks to hear of it; in the channel's thread."""
        if self._notice is not None or self.is_terminated:
            self._channel.broadcast(SnapshotWanted())

    def _end_without(self, loss: Loss) -> None:
        if not self.is_terminated:
            self._end(loss)

    def expect(self, kept: SnapshotKept) -> None:
        """Note that rank 0 has taken ``kept``, which has yet to be put in its place; in the channel's thread."""
        if kept.is_wanted:
            self._wanted_number = kept.number

    def notice_snapshot(self, number: int) -> None:
        """End the attempt if it waits for snapshot ``number``, or for more ranks, if there are free slots."""
        if number == self._wanted_number:
            self._is_kept.set()
            self._num_older = 0
        if self.is_terminated or not self._history.is_newest(number):
            return
        if self._notice is None:
            if (free := self._history.free_slots()) > 0:
                self._end_soon(Loss(rank=None, host="", cause="there is room for more ranks", free_slots=free))
        elif self._num_older > 0:
            self._num_older -= 1
        elif self._has_to_end or self._history.has_room():
            self._end_soon(self._notice)
        elif not self._awaits_room:
            self._awaits_room = True
            self._warn(
                f"{self._notice.cause}; too few other executors are there, so the run goes on there until others "
                "are, or until Spark ends the executor"
            )

    def _end_soon(self, loss: Loss) -> None:
        self._channel.call_later(0.0, partial(self._end, loss))


# Note [Departures]
#
# Some news let lagom end an attempt that could go on.
#
# SIGTERM to the driver: a snapshot, for at most LEAVE_SNAPSHOT_S, and then the end of the run (driver/termination.py).
#
# SIGTERM to a rank or a host process: the same, and then another attempt. It counts as a failure, since the driver
# cannot tell who has sent the signal: a program, or a watchdog of a system that is out of memory, may do so again.
#
# Spark decommissions an executor: a snapshot, and another attempt on the other executors, which is no failure. Spark
# lets running tasks go on until somebody ends the machine, at a time that Spark does not know. So the attempt is not
# ended before there is a snapshot, and other executors have room for the fewest ranks that the run may have. Until then
# the run goes on, and loses nothing that it would have kept without the notice. Slots of decommissioned executors are
# no slots for Spark, so the next attempt is not there. SIGTERM to a rank or host process meanwhile replaces this
# notice.
#
# Free slots for more ranks than the run has: Note [More ranks again] in driver/attempts.py.
