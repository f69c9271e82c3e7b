"""``merge``: one trace of all ranks, for Chrome and Perfetto, from each rank's own spans."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lagom.extensions.observe.timeline.clocks import Offset, offsets
from lagom.extensions.observe.timeline.rank_trace import RankTrace, exchanges, load_traces
from lagom.extensions.observe.timeline.time_breakdown import Wait, summary
from lagom.run_folder import RunFolder, write_file
from lagom.watch import spans as kinds
from lagom.watch.spans import TIMELINES, Span

RUN, TRACE, SUMMARY = "run.json", "timeline.json", "timeline-summary.json"
MAX_RANKS = 64
"""Most ranks in a trace: at most some 300 MB, which a browser can show."""
STEPS, PROGRAM, LOADER = range(3)
"""First rows of a rank."""
_LEAST_NS = 2_000
"""Shortest wait in an exchange that is shown."""


def merge_timelines(folder: RunFolder, also: str | os.PathLike[str] | None = None) -> None:
    """Merge the timelines of a run's ranks, if it has any, into one, which is also copied to ``also``."""
    if not folder.exists(TIMELINES):
        return
    path = merge(folder.at())
    if also is not None:
        write_file(Path(also).expanduser(), path.read_bytes())


def merge(folder: Path, target: Path | None = None, ranks: Sequence[int] | None = None) -> Path:
    """Write one trace of all ranks of the run in ``folder``; return its path.

    Args:
        target: path of the trace; None: "timeline.json" in ``folder``, with a summary beside it.
        ranks: ranks to merge; None: all. The trace shows the first ``MAX_RANKS`` of them, the summary all.

    Raises:
        ValueError: when there are no spans.
    """
    loaded = load_traces(folder / TIMELINES, ranks)
    if not loaded:
        raise ValueError(f"{folder} holds no timeline: run with timeline=True")
    clocks = offsets(loaded)
    waits = mark_waits(loaded, clocks)
    told = summary(loaded, waits)
    losses = list(_losses(folder, loaded, clocks))
    path = target or folder / TRACE
    if target is None:
        (folder / SUMMARY).write_text(json.dumps(told, indent=1) + "\n")
    notes = {
        "summary": told,
        "clocks": [_describe_clock(one, clocks[one.clock]) for one in loaded],
        "ranks": len(loaded),
    }
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(notes) + ',\n"traceEvents": [\n')
        file.write(",\n".join([*_events(loaded[:MAX_RANKS], clocks, waits), *losses]))
        file.write("\n]}\n")
    return path


def _losses(folder: Path, found: Sequence[RankTrace], clocks: dict[str, Offset]) -> Iterator[str]:
    """Yield a mark for each loss before the attempt that the trace shows, by the first rank's clock."""
    run = json.loads((folder / RUN).read_text()) if (folder / RUN).exists() else {}
    first, offset = found[0], clocks[found[0].clock]
    began = _began(found, clocks)
    for number, failure in enumerate(run.get("failures") or (), 1):
        at = datetime.datetime.fromisoformat(failure["time"]).timestamp() * 1e9
        on_clock = first.clock_ns + round(at) - first.wall_ns
        ns = on_clock - offset.of(on_clock) - began
        name = json.dumps(f"lost in attempt {number}: {failure['cause']}")
        yield f'{{"ph":"i","s":"g","pid":{first.rank},"tid":{STEPS},"name":{name},"cat":"loss","ts":{ns / 1000:.3f}}}'


def _began(found: Sequence[RankTrace], clocks: dict[str, Offset]) -> float:
    """Return the time of the first span, by the common clock."""
    return min((span.start - clocks[one.clock].of(span.start) for one in found for span in one.spans), default=0.0)


def _describe_clock(one: RankTrace, offset: Offset) -> dict[str, Any]:
    known = None if offset.within is None else round(offset.within / 1000, 3)
    return {
        "rank": one.rank,
        "host": one.host,
        "ahead_us": round(offset.of(one.clock_ns) / 1000, 3),
        "within_us": known,
    }


def mark_waits(found: Sequence[RankTrace], clocks: dict[str, Offset]) -> dict[tuple[str, int], Wait]:
    """Return for each exchange whose spans match the rank that came last, and when, by the common clock."""
    offset_of = {one.rank: clocks[one.clock] for one in found}
    waits = {}
    for key, spans in exchanges(found).items():
        starts = {rank: span.start - offset_of[rank].of(span.start) for rank, span in spans.items()}
        ends = [span.end - offset_of[rank].of(span.end) for rank, span in spans.items()]
        last = max(starts, key=lambda rank: starts[rank])
        slack = sum(offset_of[rank].within or 0.0 for rank in spans)
        # No exchange ends before all ranks have begun it: else a rank has left one out, and the spans do not match.
        if starts[last] <= min(ends) + slack + 1000:
            waits[key] = Wait(
                last, starts[last], {rank: (starts[rank], spans[rank].end - spans[rank].start) for rank in spans}
            )
    return waits


class _Rows:
    """Rows of one rank, numbered as they are shown: steps, program, loader, then others as they come."""

    _ORDER = ("steps", "program", "loader")

    def __init__(self) -> None:
        self.names = list(self._ORDER)
        self._busy: dict[int, list[int]] = {}

    def of(self, span: Span, thread: int) -> int:
        """Return the number of the row for ``span``."""
        if span.kind == kinds.STEP:
            return STEPS
        if span.kind == kinds.COLLECTIVE:
            return self._free(f"collectives{' of ' + span.stream if span.stream not in ('', 'ranks') else ''}", span)
        if span.kind == kinds.ASYNCHRONOUS:
            return self._free("collectives under way", span)
        if span.kind == kinds.ACTIVITY:
            return self._free(span.stream, span)
        if span.thread == thread:
            return PROGRAM
        return self._free(f"thread {span.thread}", span)

    def _free(self, name: str, span: Span) -> int:
        """Return the first row of ``name`` where this span overlaps no other, or lies inside of one."""
        for count in range(1, 1000):
            number = self._number(name if count == 1 else f"{name} ({count})")
            ends = self._busy.setdefault(number, [])
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                return number
        return number

    def _number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


def _events(
    traces: Sequence[RankTrace], clocks: dict[str, Offset], waits: dict[tuple[str, int], Wait]
) -> Iterator[str]:
    began = _began(traces, clocks)
    for trace in traces:
        rows, offset = _Rows(), clocks[trace.clock]
        yield _meta(trace.rank, 0, "process_name", {"name": f"rank {trace.rank} ({trace.host})"})
        yield _meta(trace.rank, 0, "process_sort_index", {"sort_index": trace.rank})
        # Longer spans first, so that those inside come behind them.
        for span in sorted(trace.spans, key=lambda span: (span.start, -span.end)):
            start = span.start - offset.of(span.start) - began
            row, length = rows.of(span, trace.thread), span.end - span.start
            name = f"step {span.number}" if span.kind == kinds.STEP else span.name
            yield _slice(trace.rank, row, name, span.kind, start, length, _args(span))
            if row == PROGRAM and span.kind in (kinds.DATA, kinds.COPY):
                yield _slice(trace.rank, LOADER, name, span.kind, start, length, {})
            wait = waits.get((span.stream, span.number)) if span.kind == kinds.COLLECTIVE else None
            if wait is not None and (waiting := wait.of(trace.rank)) >= _LEAST_NS:
                yield _slice(trace.rank, row, f"waits for rank {wait.last}", "wait", start, waiting, {})
        for number, name in enumerate(rows.names):
            yield _meta(trace.rank, number, "thread_name", {"name": name})
            yield _meta(trace.rank, number, "thread_sort_index", {"sort_index": number})


def _args(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if span.size:
        found["bytes"] = span.size
    if span.number >= 0:
        found["number"] = span.number
    return found


def _slice(rank: int, row: int, name: str, kind: str, start: float, length: float, args: dict[str, Any]) -> str:
    """Return an event with a duration, in microseconds; ``start`` and ``length`` are nanoseconds."""
    told = f',"args":{json.dumps(args)}' if args else ""
    return (
        f'{{"ph":"X","pid":{rank},"tid":{row},"name":{json.dumps(name)},"cat":"{kind}",'
        f'"ts":{start / 1000:.3f},"dur":{length / 1000:.3f}{told}}}'
    )


def _meta(rank: int, row: int, name: str, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "pid": rank, "tid": row, "name": name, "args": args})
