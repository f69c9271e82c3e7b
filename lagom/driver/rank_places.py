"""``RankPlaces``: the ranks and host of each task, and the texts about tasks that are silent or gone."""

from __future__ import annotations

from collections.abc import Mapping

from lagom.errors import LagomError, RankError
from lagom.watch.stall_texts import rank_names
from lagom.wire.messages import CutOff, Join

_SILENT_S = 3.5  # silence after which the user is warned; silence is measured once a second
_AT_ONCE_S = 1.5  # most seconds between the measured silences of tasks that were cut off at the same time


class RankPlaces:
    """Ranks and hosts of the tasks that have joined; see Note [Silence] in wire/peer_silence.py.

    Args:
        joins: the join message of each task; the caller adds those of later tasks.
        lost_s: seconds of silence after which a machine counts as lost.
    """

    def __init__(self, joins: Mapping[int, Join], lost_s: float) -> None:
        self._joins = joins
        self._lost_s = lost_s
        self._silent: dict[int, float] = {}

    def update(self, task: int, seconds: float) -> str | None:
        """Record how long the machine of ``task`` has been silent.

        Return a text for the user if the machine has just fallen silent, or answers again; else None.
        """
        if task not in self._joins:
            return None
        if seconds < _SILENT_S:
            was_silent = self._silent.pop(task, None) is not None
            return f"the machine that holds {self._place(task)} answers again" if was_silent else None
        was_silent, self._silent[task] = task in self._silent, seconds
        if was_silent:
            return None
        return (
            f"no sign of life for {seconds:.0f} s from the machine that holds {self._place(task)}: it is down, or cut "
            f"off from this one; after {self._lost_s:g} s the run ends"
        )

    def gone(self, task: int) -> LagomError:
        """Return the error for ``task``, whose connection has ended before the task was done."""
        if task not in self._joins:
            return LagomError(f"the process of task {task} is gone before its ranks began, perhaps killed")
        first = self._joins[task].ranks[0]
        if not self._is_lost(task):
            return RankError(f"the process that held {self._place(task)} is gone, perhaps killed", first)
        return RankError(
            f"no sign of life came for {self._lost_s:g} s from the machine that held {self._place(task)}: it is down, "
            "or cut off from this one",
            first,
        )

    def unreachable(self, message: CutOff, task: int, addresses: Mapping[int, str]) -> tuple[RankError, frozenset[str]]:
        """Return the error for ``task``, whose rank another rank does not reach, and names of its host.

        Args:
            message: from the other rank; see ``SilentPeers`` in watch/silent_peers.py.
            addresses: the address of each task, as this machine sees it.
        """
        rank, peer = message.rank, message.peer
        host = next(join.host_name for join in self._joins.values() if rank in join.ranks)
        there = self._joins[task].host_name
        text = (
            f"no sign of life came for {message.lost_s:g} s from rank {peer} on {there} to rank {rank} on {host}, "
            "while both reach the driver: the network between these hosts is cut, in one direction or both"
        )
        names = (self._joins[task].host_name, self._joins[task].ip, addresses.get(task, ""))
        return RankError(text, peer), frozenset(name for name in names if name)

    def lost_hosts(self, addresses: Mapping[int, str]) -> frozenset[str]:
        """Return names and addresses of the hosts that count as lost.

        Return none if all hosts are silent, since then this machine itself may be cut off.

        Args:
            addresses: the address of each task, as this machine sees it.
        """
        lost = [task for task in self._silent if self._is_lost(task)]
        if len(self._silent) == len(self._joins):
            return frozenset()
        names = ((self._joins[task].host_name, self._joins[task].ip, addresses.get(task, "")) for task in lost)
        return frozenset(name for three in names for name in three if name)

    def _is_lost(self, task: int) -> bool:
        """Return whether the machine of ``task`` has been silent so long that its connection has ended for this."""
        return task in self._silent and self._silent[task] >= self._lost_s - _AT_ONCE_S

    def _place(self, task: int) -> str:
        join = self._joins[task]
        return f"{rank_names(join.ranks)} on {join.host_name}"
