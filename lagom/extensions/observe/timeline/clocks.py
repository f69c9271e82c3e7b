"""``offsets``: aligns the clocks of several hosts by the ranks' exchanges. See Note [Clocks]."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from lagom.extensions.observe.timeline.rank_trace import RankTrace, exchanges
from lagom.watch.spans import Span

_TOGETHER_NS = 2_000_000_000
"""Exchanges within this time bound one offset: clocks drift apart by some 10 microseconds in it."""


@dataclass(slots=True)
class Offset:
    """The lead of a clock over the first one in nanoseconds, at some of its times; linear in between."""

    at: list[int] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    within: float | None = 0.0
    """Possible error in nanoseconds; None if unknown: the offset is then computed from the hosts' times of day."""

    def of(self, time: int) -> float:
        """Return the lead at ``time`` of the clock."""
        if not self.at:
            return 0.0
        right = bisect_left(self.at, time)
        if right in (0, len(self.at)):
            return self.ahead[min(right, len(self.at) - 1)]
        before, after = self.at[right - 1], self.at[right]
        part = (time - before) / max(after - before, 1)
        return self.ahead[right - 1] * (1 - part) + self.ahead[right] * part


def offsets(found: Sequence[RankTrace]) -> dict[str, Offset]:
    """Return the offset of each clock; the first rank's clock has the offset 0."""
    clocks = {one.rank: one.clock for one in found}
    first = found[0].clock
    known = {first: Offset()}
    for clock in clocks.values():
        if clock not in known:
            pairs = _bounds(found, first, clock)
            known[clock] = _joined(pairs) if pairs else _by_time_of_day(found, first, clock)
    return known


def _bounds(found: Sequence[RankTrace], first: str, clock: str) -> list[tuple[int, int, int]]:
    """Return for each exchange a time of ``clock``, and the least and the largest possible lead over ``first`` then."""
    clocks = {one.rank: one.clock for one in found}
    bounds = []
    for spans in exchanges(found).values():
        here = [span for rank, span in spans.items() if clocks[rank] == first]
        there = [span for rank, span in spans.items() if clocks[rank] == clock]
        if here and there:
            least = _last_start(there) - _first_end(here)
            most = _first_end(there) - _last_start(here)
            bounds.append((_first_end(there), least, most))
    return sorted(bounds)


def _last_start(spans: Sequence[Span]) -> int:
    return max(span.start for span in spans)


def _first_end(spans: Sequence[Span]) -> int:
    return min(span.end for span in spans)


def _joined(bounds: Sequence[tuple[int, int, int]]) -> Offset:
    offset = Offset()
    begin = 0
    while begin < len(bounds):
        end = begin
        while end < len(bounds) and bounds[end][0] - bounds[begin][0] <= _TOGETHER_NS:
            end += 1
        part = bounds[begin:end]
        least, most = max(one[1] for one in part), min(one[2] for one in part)
        offset.at.append((part[0][0] + part[-1][0]) // 2)
        offset.ahead.append((least + most) / 2)
        offset.within = max(offset.within or 0.0, abs(most - least) / 2)
        begin = end
    return offset


def _by_time_of_day(found: Sequence[RankTrace], first: str, clock: str) -> Offset:
    here = next(one for one in found if one.clock == first)
    there = next(one for one in found if one.clock == clock)
    ahead = (there.clock_ns - there.wall_ns) - (here.clock_ns - here.wall_ns)
    return Offset([there.clock_ns], [float(ahead)], None)


# Note [Clocks]
#
# Processes of one host have one monotonic clock. Clocks of several hosts are compared as NTP does, but without messages
# of their own: an exchange ends on no rank before all ranks have begun it. So if it ended here at one clock's time and
# began there at the other's, the difference bounds the second clock's lead; the same holds the other way round. Every
# recorded exchange gives both bounds. The best bounds within two seconds are used, which are those of the shortest
# exchanges, as NTP uses the shortest of several round trips. A recorded exchange of 100 us gives the offset to 50 us.
