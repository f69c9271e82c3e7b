"""``summary``: how each rank spent its time, and which ranks the others waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lagom.extensions.observe.timeline.rank_trace import RankTrace
from lagom.watch.spans import COLLECTIVE, PHASES, STEP, Span

Key = tuple[str, int]
"""Stream of an exchange, and its number there."""
_LATE_NS = 20_000
"""A rank that comes last by less than this counts as on time."""


class Wait(NamedTuple):
    """An exchange that several ranks have recorded; nanoseconds of the common clock."""

    last: int
    """The rank that came last."""
    at: float
    """Time at which the last rank came."""
    ranks: Mapping[int, tuple[float, int]]
    """Start and length of the exchange on each rank."""

    def of(self, rank: int) -> float:
        """Return the time that ``rank`` waited for the last rank."""
        start, length = self.ranks[rank]
        return min(max(self.at - start, 0.0), float(length))


def summary(traces: Sequence[RankTrace], waits: Mapping[Key, Wait]) -> dict[str, Any]:
    """Return figures by rank: recorded steps and their time, shares of that time, and exchanges with this rank last.

    The first step is left out, if there are others. Shares are those of the program's thread, each phase without the
    phases inside it. Exchanges are split into waiting for the rank that comes last, and moving data.
    """
    ranks = {}
    for trace in traces:
        own = [wait for wait in waits.values() if trace.rank in wait.ranks]
        late = [wait for wait in own if wait.last == trace.rank and _late(wait)]
        held_up = sum(wait.of(other) for wait in late for other in wait.ranks if other != trace.rank)
        steps = _steps(trace)
        length = sum(end - start for start, end in steps)
        ranks[str(trace.rank)] = {
            "host": trace.host,
            "steps": trace.steps,
            "steps_kept": len(steps),
            "seconds_kept": round(length / 1e9, 9),
            "shares": _shares(trace, steps, waits, max(length, 1)),
            "exchanges": len(own),
            "came_last": len(late),
            "held_up_s": round(held_up / 1e9, 6),
        }
    return {"ranks": ranks}


def _steps(trace: RankTrace) -> list[tuple[int, int]]:
    """Return start and end of each step but the first; without steps, one step from the first span to the last."""
    kept = [span for span in trace.spans if span.kind == STEP]
    steps = [(span.start, span.end) for span in kept if span.number > 1] or [(span.start, span.end) for span in kept]
    if not steps and trace.spans:
        steps = [(min(span.start for span in trace.spans), max(span.end for span in trace.spans))]
    return sorted(steps)


def _shares(
    trace: RankTrace, steps: Sequence[tuple[int, int]], waits: Mapping[Key, Wait], length: int
) -> dict[str, float]:
    times = dict.fromkeys((*PHASES, "waiting"), 0.0)
    begins = [start for start, _ in steps]
    inside: list[Span] = []
    for span in sorted(trace.spans, key=lambda span: (span.start, -span.end)):
        if span.kind not in PHASES or span.thread != trace.thread:
            continue
        place = bisect_right(begins, span.start) - 1
        if place < 0 or span.start >= steps[place][1]:
            continue
        while inside and inside[-1].end <= span.start:
            inside.pop()
        if inside:
            times[inside[-1].kind] -= span.end - span.start
        times[span.kind] += span.end - span.start
        inside.append(span)
        wait = waits.get((span.stream, span.number)) if span.kind == COLLECTIVE else None
        times["waiting"] += wait.of(trace.rank) if wait is not None else 0.0
    times["moving"] = times.pop(COLLECTIVE) - times["waiting"]
    shares = {name: round(time / length, 4) for name, time in times.items()}
    return shares | {"rest": round(max(0.0, 1 - sum(shares.values())), 4)}


def _late(wait: Wait) -> bool:
    """Return whether the last rank came after the others by more than chance."""
    starts = sorted(start for start, _ in wait.ranks.values())
    return starts[-1] - starts[-2] >= _LATE_NS
