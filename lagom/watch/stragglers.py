"""``straggler``: finds the rank that delays the others, from each rank's waiting times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lagom.wire.messages import ProgressReport

_WORTH = 0.1
"""Share of the others' time from which a straggler is reported."""


class Waits(NamedTuple):
    """The shares of its time that a rank waits for others, as in ``ProgressReport``."""

    waits: float
    waits_for: Mapping[str, float]


def held_up(ranks: Mapping[int, ProgressReport | Waits | None]) -> dict[int, float]:
    """Return for each rank the share of time (0 to 1) for which the other ranks wait for it, on average.

    Args:
        ranks: last heartbeat of each rank; None of a rank without one.
    """
    others = max(len(ranks) - 1, 1)
    seconds = dict.fromkeys(ranks, 0.0)
    for one in ranks.values():
        for rank, share in one.waits_for.items() if one is not None else ():
            if int(rank) in seconds:
                seconds[int(rank)] += share / others
    return seconds


def straggler(ranks: Mapping[int, ProgressReport | Waits | None]) -> tuple[int, float] | None:
    """Return the rank that the others wait for most, and the share of their time; None if no rank stands out."""
    found = held_up(ranks)
    rank = max(found, key=lambda one: (found[one], -one), default=None)
    if rank is None or found[rank] < _WORTH:
        return None
    own = ranks[rank]
    if own is not None and own.waits > found[rank] / 2:
        return None  # a rank that waits for others about as much as they wait for it is no straggler
    return rank, found[rank]
