"""``RunDisplay``: shows the ranks' messages to the user, and records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lagom.driver.view_part import ViewPart
from lagom.plan import Plan
from lagom.restart.history import RunHistory
from lagom.watch.messages import OWN, OWN_NOTICE, Picture, Timeline
from lagom.watch.output import Output
from lagom.watch.progress import Progress
from lagom.watch.run_dir import RunRecords
from lagom.watch.stall_texts import stall_text
from lagom.wire.messages import (
    Dropped,
    LocalEvent,
    Log,
    Message,
    ProgressReport,
    RanksStarted,
    Stalled,
    StallsDue,
    TaskJoined,
    Warned,
)
from lagom.wire.snapshot_messages import NoSnapshot, OutputMark, SnapshotArrived


class RunDisplay:
    """Shows progress, output and warnings of an attempt; skips output that an earlier attempt has shown already.

    Shows nothing of a rehearsal.
    """

    def __init__(
        self,
        plan: Plan,
        where: str,
        records: RunRecords | None,
        history: RunHistory,
        parts: Sequence[ViewPart],
        put_later: Callable[[float, LocalEvent], None],
        notice_snapshot: Callable[[int], None],
    ) -> None:
        """Show an attempt of ``plan`` on the ranks of ``where``.

        Args:
            put_later: calls ``show`` with an event after some seconds.
            notice_snapshot: called with the number of each snapshot that is in its place.
        """
        self._plan = plan
        self._records = records
        self._history = history
        self._parts = parts
        self._put_later = put_later
        self._notice_snapshot = notice_snapshot
        self._stalled: dict[int, Stalled] = {}
        self._own = set[str]()
        """Texts of lagom itself that some rank has sent."""
        self._progress = Progress(plan, where, records.said if records is not None else None)
        self._output = Output(plan.config.log == "all", self._progress.line.make_room)

    def close(self, ended: str) -> None:
        """Show the last state; ``ended`` is the outcome in a few words."""
        self._output.close()
        self._progress.close(ended)

    def waiting(self, joined: int, wanted: int) -> None:
        """Tell the user that tasks have not started yet."""
        if self._plan.rehearsal is None:
            self._progress.waiting(joined, wanted)

    def unheard(self) -> None:
        """Tell the user that the ranks cannot reach the driver: they send no messages before they end."""
        if self._plan.rehearsal is None:
            self._progress.unheard()
            if self._history.folder is not None:
                self._show_no_snapshot("executors cannot reach the driver")

    def show(self, event: Message | LocalEvent) -> None:
        """Show and record one message or event.

        Raises:
            LagomError: if the user ends the run from the debugger.
        """
        if self._plan.rehearsal is not None:
            return
        records = self._records
        match event:
            case Log():
                self._show_output(event)
            case ProgressReport():
                self._progress.update(event)
                if records is not None:
                    records.progressed(event)
            case TaskJoined():
                self._progress.joined(event)
            case RanksStarted() if records is not None:
                records.started(event.pids)
            case Picture():
                self._show_picture(event.png)
            case Timeline() if records is not None:
                records.timed(event)
            case OutputMark():
                self._history.output.mark(event.number)
            case SnapshotArrived():
                self._show_snapshot(event)
            case NoSnapshot():
                self._show_no_snapshot(event.why)
            case Dropped():
                self._progress.warn(f"{event.messages} pieces of output were dropped: the driver could not keep up")
            case Warned():
                self._progress.warn(event.text)
            case Stalled():
                self._keep_stall(event)
            case StallsDue():
                self._show_stalls()
            case _:
                write = partial(self._output.write, "stdout")
                any(part.show(event, write, self._progress.warn) for part in self._parts)

    def _keep_stall(self, event: Stalled) -> None:
        """Keep a stall for a moment: ranks that wait for the stalled rank report theirs soon after."""
        self._stalled[event.rank] = event
        beat_s = min(self._plan.config.hb_interval, self._plan.config.stall_timeout_s / 4)
        self._put_later(beat_s + 0.5, StallsDue())

    def _show_stalls(self) -> None:
        stalled, self._stalled = self._stalled, {}
        if stalled:
            self._progress.stalled(stalled, stall_text(stalled, self._plan.world_size))

    def _show_snapshot(self, event: SnapshotArrived) -> None:
        """Record a snapshot, and first put it in place if a host has sent it."""
        kept = event.kept
        why = self._history.keep(kept.number, kept.sha256, is_whole=event.is_whole) if kept.sha256 else ""
        if why:
            self._show_no_snapshot(why)
            return
        self._note("snapshots", {"number": kept.number, "at": kept.at, "place": kept.place, "bytes": kept.bytes})
        self._note("without_snapshots", None)
        self._notice_snapshot(kept.number)

    def _show_no_snapshot(self, why: str) -> None:
        self._note("without_snapshots", why)
        self._progress.warn(f"no snapshot can be taken: {why}")

    def _note(self, name: str, value: object) -> None:
        if self._records is not None:
            self._records.note(name, value)

    def _show_output(self, log: Log) -> None:
        data = self._history.output.new_part(log.rank, log.stream, log.data.encode("latin-1"))
        if log.stream in (OWN, OWN_NOTICE):
            self._show_own(log.rank, data.decode(errors="replace").rstrip("\n"), log.stream == OWN_NOTICE)
            return
        if data and self._records is not None:
            self._records.wrote(log.rank, data)
        self._output.show(log.rank, log.stream, data)

    def _show_own(self, rank: int, text: str, is_notice: bool) -> None:
        """Show a text of lagom from rank 0, or from all ranks with ``log="all"``; only record new texts of other ranks.

        Most texts are the same on all ranks.
        """
        is_new = text not in self._own
        self._own.add(text)
        if text and self._plan.config.log == "all":
            self._progress.line.say("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))
        elif text and rank == 0 and is_notice:
            self._progress.show_notice(text)
        elif text and rank == 0:
            self._progress.line.say(text)
        elif text and is_new and self._records is not None:
            self._records.said(f"[rank {rank}] {text}")

    def _show_picture(self, png: str) -> None:
        if self._history.output.is_new_picture(png):
            path = self._records.showed(png) if self._records is not None else None
            self._progress.picture(png, path)
