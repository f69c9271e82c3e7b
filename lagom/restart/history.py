"""``RunHistory``: the driver's record of a run's attempts, from which the next attempt begins."""

from __future__ import annotations

import copy
import datetime
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lagom.errors import LagomError
from lagom.restart.kept_snapshots import Snapshot, SnapshotFolder, SnapshotPlace
from lagom.restart.losses import Loss
from lagom.restart.shown_output import ShownOutput
from lagom.restart.written_files import WrittenFiles

log = logging.getLogger("lagom")
Failure = dict[str, Any]
"""A loss as ``result.failures`` lists it: time, rank, host, cause, resumed_from, seconds_lost."""
BEGINNING = "the beginning"


class RunHistory:
    """Losses, files and output of all attempts of one run.

    ``wrote`` and ``ranks_began`` are called in the thread that serves the tasks' connections, all else in the caller's.

    Args:
        max_failures: most losses after which the run goes on.
        changed: called with all failures when one is added or completed.
        snapshots: folder of the run's snapshots, if it keeps any; the first attempt goes on from the newest.
        say: tells the user about damaged snapshots.

    Raises:
        LagomError: if all snapshots are damaged, or it is not known which files the run has written.
    """

    def __init__(
        self,
        max_failures: int = 0,
        changed: Callable[[list[Failure]], None] = lambda _: None,
        snapshots: SnapshotFolder | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._max_failures = max_failures
        self.output = ShownOutput()
        self.files = WrittenFiles()
        self.failures: list[Failure] = []
        self.free_slots: Callable[[], int] = lambda: 0
        """Returns the number of slots for more ranks than the present attempt has."""
        self.has_room: Callable[[], bool] = lambda: True
        """Returns whether executors that Spark does not decommission have slots for the fewest ranks of the run."""
        self.leave: Callable[[], bool] = lambda: False
        """Ends the present attempt, after a snapshot; returns False if no ranks run."""
        self.loss: Loss | None = None
        """The loss with which the present attempt has ended; None if it goes on, or had another end."""
        self._changed = changed
        self._began: float = time.time()
        """Start of the ranks of the present attempt; until they start, of those of the lost attempt before."""
        self.folder = snapshots
        """Folder of the run's snapshots, if it keeps any."""
        self._last_number = 0
        self.resumed: Snapshot | None = None
        """The snapshot from which the present attempt goes on; None if it begins from the beginning."""
        self._say = say
        if snapshots is not None and (newest := snapshots.newest_whole(say)) is not None:
            for message in snapshots.messages(newest, say):
                self.files.take(message)
            self._resume(newest)
        elif snapshots is not None and snapshots.has_damaged:
            raise LagomError(f"all snapshots in {snapshots.path} are damaged, so the run cannot go on; begin a new run")
        self._joined: float | None = None
        self.attempt_began_at: float | None = None
        """Monotonic time at which the present attempt began."""
        self.has_begun_again = False
        """Whether the present attempt is not the first one."""
        self.ranks_began_at: float | None = None
        """Monotonic time at which its ranks began; None if they have not, or did not say so."""
        self._follows_loss = False
        """Whether the present attempt was begun after a failure: it completes this failure's record."""

    @property
    def num_attempts(self) -> int:
        """Return the number of the present attempt: one more than the losses so far."""
        return len(self.failures) + 1

    def attempt_began(self) -> None:
        """Note that an attempt begins, which first waits for slots."""
        self.has_begun_again = self.attempt_began_at is not None
        self.attempt_began_at, self.ranks_began_at = time.monotonic(), None

    def ranks_began(self) -> None:
        """Note that the ranks of the present attempt have begun.

        The time since the snapshot that they go on from, or since the lost attempt began, is lost.
        """
        if self._joined is None:
            self._joined, self.ranks_began_at = time.time(), time.monotonic()
            if self._follows_loss:
                before = self.resumed.facts["at"] if self.resumed is not None else self._began
                self._complete(self.resumed.place if self.resumed is not None else BEGINNING, self._joined - before)
            self._began = self._joined

    def wrote(self, note: Mapping[str, Any]) -> None:
        """Record a ``FileNote`` of rank 0, as a dict; its details become entries of the dict that is kept."""
        message = {name: value for name, value in note.items() if name != "details"} | note["details"]
        if message["what"] == "resumed" and self._follows_loss and self._joined is not None:
            self._complete(message["path"], self._joined - message["at"])
        message = {**message, "told_at": time.time()}
        self.files.take(message)
        if self.folder is not None:
            self.folder.add_message(message)

    def begins_again(self, loss: Loss | None) -> bool:
        """Return whether ``max_failures`` lets the run begin again if the present attempt ends with ``loss``."""
        return loss is not None and (not loss.counts or len(self.failures) < self._max_failures)

    def is_newest(self, number: int) -> bool:
        """Return whether ``number`` is that of the run's newest snapshot."""
        return self._newest_number() == number

    def note_kept(self, number: int, sha256: str) -> None:
        """Note that a rank has kept snapshot ``number``, with the digest of its description."""
        if self.folder is not None:
            self.folder.note_kept(number, sha256)

    def has_newer_snapshot(self) -> bool:
        """Return whether the present attempt has kept a snapshot."""
        return self._newest_number() > (self.resumed.number if self.resumed is not None else 0)

    def _newest_number(self) -> int:
        """Return the number of the run's newest snapshot; 0 if there is none."""
        with suppress(OSError):  # the folder may be gone
            if self.folder is not None and (newest := self.folder.newest()) is not None:
                return newest.number
        return 0

    def files_before(self) -> WrittenFiles | None:
        """Return a copy of the files that the attempts so far have written, for the attempt that is about to begin.

        Then forget which files are being written, and that an attempt has read a checkpoint. Return None if there can
        be only one attempt.
        """
        if self._max_failures == 0 and self.folder is None:
            return None
        files = copy.deepcopy(self.files)
        self.files.goes_on = False
        self.files.writing.clear()
        return files

    @property
    def num_left(self) -> int:
        """Return how many losses the run may yet go on after."""
        return max(0, self._max_failures - len(self.failures))

    def fail(self, loss: Loss) -> None:
        """Add ``loss`` to the failures, and prepare for the next attempt."""
        when = datetime.datetime.fromtimestamp(loss.at, datetime.timezone.utc).isoformat(timespec="milliseconds")
        failure = {"time": when, "rank": loss.rank, "host": loss.host, "cause": loss.cause}
        self.failures.append({**failure, "resumed_from": None, "seconds_lost": None})
        self._complete(None, time.time() - self._began)
        self.prepare()
        self._follows_loss = True

    def prepare(self) -> None:
        """Prepare for the next attempt, from the newest snapshot, or from the beginning."""
        self._follows_loss = False
        newest = self.folder.newest_whole(self._say) if self.folder is not None else None
        if newest is not None:
            self._resume(newest)
            self.output.go_back(newest.number)
        else:
            self.output.begin_again()
        self.loss = self._joined = None

    @property
    def snapshots(self) -> SnapshotPlace | None:
        """Return where the present attempt keeps snapshots, and the one that it goes on from; None if it keeps none."""
        if self.folder is None:
            return None
        return SnapshotPlace(self.folder, self.resumed, last_number=self._note_number())

    def keep(self, number: int, sha256: Sequence[str], *, is_whole: bool) -> str:
        """Give the snapshot that a host has sent its final name; return an empty text, or why it is not usable.

        Args:
            sha256: digests of state and description.
            is_whole: whether the bytes that came have these digests.
        """
        if self.folder is None:
            return "the run keeps none"
        try:
            if not is_whole:
                raise OSError("other bytes came to the driver than were sent")
            for path in (self.folder.partial(number), self.folder.partial_facts(number)):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            self.folder.put_in_place(number)
            self.folder.note_kept(number, sha256[1])
        except OSError as error:
            self.folder.remove_partial(number)
            return str(error)
        return ""

    def give_up_snapshots(self) -> None:
        """Remove the snapshots, and have the next attempt begin from the beginning."""
        if self.folder is not None:
            self._note_number()
            self.folder.remove_all()
        self.resumed = None
        self.files.forget_snapshot()
        self.output.begin_again()
        self.loss = self._joined = None

    def _note_number(self) -> int:
        """Return the largest number that a snapshot has had so far; later snapshots get larger ones."""
        newest = self.folder.newest() if self.folder is not None else None
        self._last_number = max(self._last_number, newest.number if newest is not None else 0)
        return self._last_number

    def _resume(self, snapshot: Snapshot) -> None:
        self.resumed = snapshot
        self.files.go_back(snapshot.facts["lengths"], snapshot.facts["at"])

    def _complete(self, resumed_from: str | None, seconds: float) -> None:
        self.failures[-1] |= {"resumed_from": resumed_from, "seconds_lost": round(seconds, 3)}
        self._changed(self.failures)
