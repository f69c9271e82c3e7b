"""``Launcher`` and ``Outcome``: the interface of launchers, and their result for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lagom.call import Call
from lagom.cluster import Cluster
from lagom.plan import Plan
from lagom.records.run_dir import RunRecords
from lagom.restart.history import RunHistory
from lagom.restart.losses import Loss
from lagom.wire.client import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Report of one rank's end, with a function that unpickles the value or exception that it left."""

    rank: int
    report: Message
    """``ok``, and for a failure its ``error``, ``message`` and ``traceback`` as text."""
    load: Callable[[], Mapping[str, Any]]
    """Unpickles ``{"value": ..., "samples": ...}`` and more, see ``bootstrap``, or ``{"error": exception or None}``."""


class Launcher(Protocol):
    """Starts ranks in one kind of place, and returns their outcomes."""

    def cluster(self) -> Cluster:
        """Return the facts from which a plan is made."""

    def where(self) -> str:
        """Name the place for a reader: "Spark local[2]", "this machine"."""

    def slots_again(self, wanted: int, loss: Loss) -> int:
        """Return the task slots for a new attempt after ``loss``, at most ``wanted``; wait some seconds for them.

        Slots on hosts that are cut off do not count, and are not used.
        """

    def run(
        self, plan: Plan, call: Call, records: RunRecords | None = None, history: RunHistory | None = None
    ) -> list[Outcome]:
        """Run ``call`` on all ranks; return their outcomes in rank order, failures among them.

        ``records`` keeps output and progress; ``history`` has the earlier attempts, and gets the loss of this one.

        Raises:
            LagomError: if ranks could not be started or were lost.
            PayloadError: if ``call`` cannot be pickled.
        """
