"""``Launcher`` and ``Outcome``: the interface of launchers, and their result for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from lagom.cluster import Cluster
from lagom.plan import Plan
from lagom.program.signature import Call
from lagom.restart.history import RunHistory
from lagom.watch.run_dir import RunRecords
from lagom.wire.messages import RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Report of one rank's end, with a function that unpickles the rank's value or exception."""

    rank: int
    report: RankReport
    load: Callable[[], Mapping[str, Any]]
    """Unpickles ``{"value": ..., "samples": ..., ...}`` (``Returned`` in on_rank/bootstrap.py), or
    ``{"error": exception or None}``. Unpickling a class of the program may raise any error."""


class Launcher(Protocol):
    """Starts ranks in one kind of place, and returns their outcomes."""

    def cluster(self) -> Cluster:
        """Return the facts about the cluster from which a plan is made.

        Raises:
            LagomError: if no run is possible there, for example without torch, or with a wrong setting of Spark.
        """

    def where(self) -> str:
        """Return the place where ranks run, as a text for the user: "Spark local[2]", "this machine"."""

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        """Return how many of ``wanted`` tasks can run at the same time after a loss; all if this cannot be counted.

        Args:
            wanted: the most slots to return.
            wait_s: longest wait for ``wanted`` slots.
            cut_off: names and addresses of unreachable hosts, on which no task must start.
        """

    def free_slots(self, running: int, *, one_host: bool) -> int:
        """Return the number of slots in which no task runs now; 0 where a run cannot grow, or slots cannot be counted.

        Args:
            running: number of slots that the run itself uses.
            one_host: return 0 if executors are on several hosts.
        """

    def run(
        self, plan: Plan, call: Call, records: RunRecords | None = None, history: RunHistory | None = None
    ) -> list[Outcome]:
        """Run ``call`` on all ranks; return the outcomes of all ranks in rank order, also those of failed ranks.

        Args:
            records: keeps output and progress; None keeps nothing.
            history: has the earlier attempts, and receives the loss of this attempt.

        Raises:
            LagomError: if ranks could not be started or were lost.
            PayloadError: if ``call`` cannot be pickled.
            Exception: the function's own, with the inline launcher alone.
        """
