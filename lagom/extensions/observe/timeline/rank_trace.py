"""``RankTrace``: the recorded spans of one rank, in a run's folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lagom.watch.spans import ASYNCHRONOUS, COLLECTIVE, Span

APART = frozenset(("broadcast", "broadcast_object_list", "gather", "reduce", "scatter"))
"""Exchanges that may end on one rank before all have begun them; so may those named "(begun)", but no others."""


@dataclass(slots=True)
class RankTrace:
    """Spans of a rank; times are nanoseconds of the clock ``clock``."""

    rank: int
    host: str = ""
    clock: str = ""
    thread: int = 0
    """The program's thread."""
    wall_ns: int = 0
    """Time of day when ``clock`` showed ``clock_ns``."""
    clock_ns: int = 0
    steps: int = 0
    spans: list[Span] = field(default_factory=list)


def load_traces(folder: Path, ranks: Sequence[int] | None = None) -> list[RankTrace]:
    """Return the traces of ``ranks`` (None: all) in ``folder``, by rank; a line that was cut off is left out."""
    found = []
    for path in folder.glob("rank-*.jsonl"):
        rank = int(path.stem.partition("-")[2])
        if ranks is None or rank in ranks:
            found.append(_read(path, rank))
    return sorted(found, key=lambda one: one.rank)


def _read(path: Path, rank: int) -> RankTrace:
    trace = RankTrace(rank)
    with path.open() as file:
        for line in file:
            try:
                block: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            for name in ("host", "clock", "thread", "wall_ns", "clock_ns", "steps"):
                setattr(trace, name, block[name])
            trace.spans.extend(Span(*span) for span in block["spans"])
    return trace


def exchanges(found: Sequence[RankTrace], *, together: bool = True) -> dict[tuple[str, int], dict[int, Span]]:
    """Return exchanges of at least two ranks by stream and number, with the span of each rank.

    Args:
        together: return only exchanges in which all ranks wait for all ranks.
    """
    by_key: dict[tuple[str, int], dict[int, Span]] = defaultdict(dict)
    for one in found:
        for span in one.spans:
            if span.kind in (COLLECTIVE, ASYNCHRONOUS) and span.number >= 0 and span.stream:
                by_key[span.stream, span.number][one.rank] = span
    return {
        key: spans
        for key, spans in by_key.items()
        if len(spans) > 1 and (not together or not any(_ends_early(span.name) for span in spans.values()))
    }


def _ends_early(name: str) -> bool:
    return name in APART or name.endswith("(begun)")
