"""Rates of things that give rows without end; for Pythons of today and of petastorm's time."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 20.0
"""After which what has come is counted."""
LEAST_S = 1.0
"""For which it is counted at least: two passes over a small table are over in 0.1 s."""


class Rate(NamedTuple):
    """What a contender did."""

    rows_s: float
    mb_s: float
    peak_mb: float
    """Of the process and the largest of its children."""


def rate(batches: Iterator[int], num_rows: int, row_bytes: int) -> Rate:
    """Rows a second after a first pass over ``num_rows`` rows, in two or ``LEAST_S``; ``batches`` gives sizes."""
    seen, begun, start = 0, 0, time.perf_counter()
    first = start
    for size in batches:
        seen += size
        now = time.perf_counter()
        if not begun and (seen >= num_rows or now - first > LIMIT_S / 2):
            begun, start = seen, now
        elif begun and ((seen >= 3 * num_rows and now - start > LEAST_S) or now - first > LIMIT_S):
            break
    rows_s = (seen - begun) / (time.perf_counter() - start)
    return Rate(rows_s, rows_s * row_bytes / 1e6, _peak_mb())


def _peak_mb() -> float:
    # Not RUSAGE_SELF, which takes over what the process was before it became this program: its parent's memory.
    with open("/proc/self/status") as status:
        own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024
