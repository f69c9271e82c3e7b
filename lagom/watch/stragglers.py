"""``straggler``: finds the rank that delays the others, from each rank's waiting times."""

from __future__ import annotations

from collections.abc import Mapping

from lagom.wire.client import Message

_WORTH = 0.1
"""Share of the others' time from which a straggler is reported."""


def held_up(ranks: Mapping[int, Message]) -> dict[int, float]:
    """Return for each rank the share of time (0 to 1) for which the other ranks wait for it, on average.

    Args:
        ranks: each rank's last message; its ``waits_for`` has the shares of time that it waits for other ranks.
    """
    others = max(len(ranks) - 1, 1)
    found = dict.fromkeys(ranks, 0.0)
    for one in ranks.values():
        for rank, share in (one.get("waits_for") or {}).items():
            if int(rank) in found:
                found[int(rank)] += float(share) / others
    return found


def straggler(ranks: Mapping[int, Message]) -> tuple[int, float] | None:
    """Return the rank that the others wait for most, and the share of their time; None if no rank stands out."""
    found = held_up(ranks)
    rank = max(found, key=lambda one: (found[one], -one), default=None)
    if rank is None or found[rank] < _WORTH or float(ranks[rank].get("waits") or 0.0) > found[rank] / 2:
        return None  # a rank that waits for others about as much as they wait for it is no straggler
    return rank, found[rank]
