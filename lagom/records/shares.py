"""``summary``: where the time of each rank has gone, and for whom the ranks have waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lagom.monitor.spans import COLLECTIVE, PHASES
from lagom.records.recorded import Recorded

_LATE_NS = 20_000
"""Who comes last by less than that has come with the others."""


class Wait(NamedTuple):
    """An exchange that several ranks have recorded; nanoseconds of the common clock."""

    last: int
    """The rank that came last."""
    at: float
    """When it came."""
    ranks: Mapping[int, tuple[float, int]]
    """When each rank came, and how long its exchange took."""

    def of(self, rank: int) -> float:
        """How long ``rank`` waited for the last one."""
        start, length = self.ranks[rank]
        return min(max(self.at - start, 0.0), float(length))


def summary(found: Sequence[Recorded], waits: Mapping[tuple[str, int], Wait]) -> dict[str, Any]:
    """By rank: shares of its time by phase, with exchanges parted into moving and waiting; steps; came last.

    The parts of exchanges, and who came last, are those of the steps that have been kept.
    """
    ranks = {}
    for one in found:
        own = [wait for wait in waits.values() if one.rank in wait.ranks]
        length = sum(wait.ranks[one.rank][1] for wait in own)
        waiting = sum(wait.of(one.rank) for wait in own) / length if length else 0.0
        elapsed = max(one.elapsed, 1)
        shares = {phase: round(one.totals.get(phase, 0) / elapsed, 4) for phase in PHASES}
        exchanging = shares.pop(COLLECTIVE)
        shares |= {"waiting": round(exchanging * waiting, 4), "moving": round(exchanging * (1 - waiting), 4)}
        shares["rest"] = round(max(0.0, 1 - sum(shares.values())), 4)
        late = [wait for wait in own if wait.last == one.rank and _late(wait)]
        held_up = sum(wait.of(other) for wait in late for other in wait.ranks if other != one.rank)
        ranks[str(one.rank)] = {
            "host": one.host,
            "seconds": round(elapsed / 1e9, 3),
            "steps": one.steps,
            "shares": shares,
            "came_last": len(late),
            "held_up_s": round(held_up / 1e9, 6),
        }
    return {"exchanges": len(waits), "ranks": ranks}


def _late(wait: Wait) -> bool:
    """Whether the last rank came after the others by more than chance."""
    starts = sorted(start for start, _ in wait.ranks.values())
    return starts[-1] - starts[-2] >= _LATE_NS
