"""``RunDisplay``: shows the ranks' messages to the user, and records them."""

from __future__ import annotations

from functools import partial

from lagom.extensions.observe.debugger.terminal import DebugTerminal
from lagom.plan import Plan
from lagom.restart.history import RunHistory
from lagom.watch.output import OWN, OWN_NOTICE, Output
from lagom.watch.progress import Progress
from lagom.watch.run_dir import RunRecords
from lagom.watch.stall_texts import stall_text
from lagom.wire.client import Message


class RunDisplay:
    """Shows progress, output and warnings of an attempt; skips output that an earlier attempt has shown already.

    Shows nothing of a rehearsal.
    """

    def __init__(
        self, plan: Plan, where: str, records: RunRecords | None, history: RunHistory, debugger: DebugTerminal
    ) -> None:
        self._plan = plan
        self._records = records
        self._history = history
        self._debugger = debugger
        self._stalled: dict[int, Message] = {}
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
            if self._plan.config.snapshot_every_s is not None:
                self._show_snapshot({"what": "none", "why": "executors cannot reach the driver"})

    def show(self, event: Message) -> None:
        """Show and record one message.

        Raises:
            LagomError: if the user ends the run from the debugger.
        """
        if self._plan.rehearsal is not None:
            return
        kind, records = event["type"], self._records
        if kind == "log":
            self._show_output(event)
        elif kind == "debug":
            self._debugger.show(event, partial(self._output.write, "stdout"), self._progress.warn)
        elif kind == "picture":
            self._show_picture(event["png"])
        elif kind == "timeline":
            if records is not None:
                records.timed(event)
        elif kind == "started":
            if records is not None:
                records.started(event["pids"])
        elif kind == "mark":
            self._history.output.mark(event["number"])
        elif kind == "snapshot":
            self._show_snapshot(event)
        elif kind == "dropped":
            self._progress.warn(f"{event['messages']} pieces of output were dropped: the driver could not keep up")
        elif kind == "warning":
            self._progress.warn(event["text"])
        elif kind == "stalled":
            self._stalled[event["rank"]] = event
        elif kind == "show_stalls":
            stalled, self._stalled = self._stalled, {}
            if stalled:
                self._progress.stalled(stalled, stall_text(stalled, self._plan.world_size))
        else:
            self._progress.show(event)
            if records is not None and kind == "progress":
                records.progressed(event)

    def _show_snapshot(self, event: Message) -> None:
        """Record a snapshot, and first put it in place if a host has sent it; or show why none can be taken."""
        if event["what"] == "kept" and "is_whole" in event and (why := self._history.keep(event)):
            event = {"what": "none", "why": why}
        if event["what"] == "kept":
            self._note("snapshots", {name: event[name] for name in ("number", "at", "place", "bytes")})
            self._note("without_snapshots", None)
        else:
            self._note("without_snapshots", event["why"])
            self._progress.warn(f"no snapshot can be taken: {event['why']}")

    def _note(self, name: str, value: object) -> None:
        if self._records is not None:
            self._records.note(name, value)

    def _show_output(self, event: Message) -> None:
        data = self._history.output.new_part(event["rank"], event["stream"], event["data"].encode("latin-1"))
        if event["stream"] in (OWN, OWN_NOTICE):
            self._show_own(event["rank"], data.decode(errors="replace").rstrip("\n"), event["stream"] == OWN_NOTICE)
            return
        if data and self._records is not None:
            self._records.wrote(event["rank"], data)
        self._output.show(event["rank"], event["stream"], data)

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
