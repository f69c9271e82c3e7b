"""What a launcher is, and what it gives back for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lagom.cluster import Cluster
from lagom.plan import Plan
from lagom.records.run_dir import RunRecords
from lagom.wire.client import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one rank."""

    rank: int
    report: Message
    """``ok``, and for a failure its ``error``, ``message`` and ``traceback`` as text."""
    load: Callable[[], Mapping[str, Any]]
    """Unpickles ``{"value": ..., "samples": ...}`` and more, see ``bootstrap``, or ``{"error": exception or None}``."""


class Launcher(Protocol):
    """Starts ranks somewhere, and brings their outcomes home."""

    def cluster(self) -> Cluster:
        """The facts a plan is made from."""

    def where(self) -> str:
        """The place, for a reader: "Spark local[2]", "this machine"."""

    def run(self, plan: Plan, call: Mapping[str, Any], records: RunRecords | None = None) -> list[Outcome]:
        """Run ``call`` on all ranks; returns their outcomes in rank order, failures among them.

        What ranks write and do is kept in ``records``.

        Raises:
            LagomError: when ranks could not be started or were lost.
            PayloadError: when ``call`` cannot travel.
        """
