"""``RankPlaces``: which ranks a task holds, and on which host; and what to say of one that is silent or gone."""

from __future__ import annotations

from collections.abc import Mapping

from lagom.errors import LagomError, RankError
from lagom.monitor.stalls import ranks_of
from lagom.wire.client import Message

_SILENT_S = 3.5  # without a sign of life from a machine, before it is named; looked for once a second


class RankPlaces:
    """Of the tasks that have joined; see Note [Silence] in wire/peer_silence.py.

    Args:
        joins: what each task said when it joined.
        lost_s: seconds of silence after which a machine is given up.
    """

    def __init__(self, joins: Mapping[int, Message], lost_s: float) -> None:
        self._joins = joins
        self._lost_s = lost_s
        self._silent: set[int] = set()

    def heed(self, task: int, seconds: float) -> str | None:
        """Take in for how long the machine of ``task`` has been silent; returns what to say of it, if anything."""
        if task not in self._joins or (seconds >= _SILENT_S) == (task in self._silent):
            return None
        if seconds < _SILENT_S:
            self._silent.discard(task)
            return f"the machine that holds {self._place(task)} answers again"
        self._silent.add(task)
        return (
            f"no sign of life for {seconds:.0f} s from the machine that holds {self._place(task)}: it is down, or cut "
            f"off from this one; after {self._lost_s:g} s the run ends"
        )

    def gone(self, task: int) -> LagomError:
        """The error for a task whose connection has ended before it was done."""
        if task not in self._joins:
            return LagomError(f"the process of task {task} is gone before its ranks began, perhaps killed")
        first = int(self._joins[task]["ranks"][0])
        if task not in self._silent:
            return RankError(f"the process that held {self._place(task)} is gone, perhaps killed", first)
        return RankError(
            f"no sign of life came for {self._lost_s:g} s from the machine that held {self._place(task)}: it is down, "
            "or cut off from this one",
            first,
        )

    def _place(self, task: int) -> str:
        join = self._joins[task]
        return f"{ranks_of(join['ranks'])} on {str(join['host']).split('|')[0]}"
