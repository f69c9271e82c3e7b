"""``Loss``: the end of an attempt after which the run begins again; an error of the program is none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of a rank, or of a process or machine that held ranks: the rank, its host, the cause and the time."""

    rank: int | None
    """The first rank that was lost; None if it is not known, or if no rank was lost."""
    host: str
    cause: str
    """A sentence without its full stop: "rank 1 was killed by SIGKILL"."""
    at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    cut_off: frozenset[str] = frozenset()
    """Names and addresses of the hosts that gave no sign of life; empty if only processes were lost."""
    free_slots: int = 0
    """Number of slots for more ranks, if lagom ended the attempt to use them and nothing was lost; else 0."""
    is_planned: bool = False
    """Whether lagom ended the attempt after a snapshot, as Spark had announced the loss, and nothing was lost."""

    @property
    def counts(self) -> bool:
        """Whether this is one of at most ``max_failures`` losses."""
        return self.free_slots == 0 and not self.is_planned


class FailureReport(Protocol):
    """The fields of ``RankReport`` in wire/messages.py that tell of a loss."""

    @property
    def rank(self) -> int: ...

    @property
    def consequence(self) -> bool: ...

    @property
    def lost(self) -> bool: ...

    @property
    def order(self) -> int: ...

    @property
    def message(self) -> str: ...


def loss_in(reports: Sequence[FailureReport], hosts: Mapping[int, str]) -> Loss | None:
    """Return the loss that ranks' failure ``reports`` tell of; None if the program itself failed, or nothing did.

    Args:
        hosts: the host of each rank.
    """
    causes = [report for report in reports if not report.consequence]
    if not causes or not all(report.lost for report in causes):
        return None
    first = min(causes, key=lambda report: report.order)
    return Loss(rank=first.rank, host=hosts.get(first.rank, ""), cause=first.message)
