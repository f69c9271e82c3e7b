"""``RankPlaces``: the ranks and host of each task, and the texts about tasks that are silent or gone."""

from __future__ import annotations

from collections.abc import Mapping

from lagom.errors import LagomError, RankError
from lagom.monitor.stalls import rank_names
from lagom.wire.client import Message

_SILENT_S = 3.5  # of silence, after which a machine is named; checked once a second


class RankPlaces:
    """Ranks and hosts of the tasks that have joined; see Note [Silence] in wire/peer_silence.py.

    Args:
        joins: the join message of each task.
        lost_s: seconds of silence after which a machine counts as lost.
    """

    def __init__(self, joins: Mapping[int, Message], lost_s: float) -> None:
        self._joins = joins
        self._lost_s = lost_s
        self._silent: set[int] = set()

    def update(self, task: int, seconds: float) -> str | None:
        """Record how long the machine of ``task`` has been silent; return a text for the user if that has changed."""
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
        """Return the error for a task whose connection ended before the task was done."""
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

    def silent_hosts(self) -> frozenset[str]:
        """Return names and addresses of the hosts that are silent."""
        joins = [self._joins[task] for task in self._silent]
        return frozenset(name for join in joins for name in (str(join["host"]).split("|")[0], str(join["ip"])))

    def _place(self, task: int) -> str:
        join = self._joins[task]
        return f"{rank_names(join['ranks'])} on {str(join['host']).split('|')[0]}"
