"""``rate``: measures rows per second of an endless iterator of batches. Also runs in petastorm's older Python."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 20.0
"""Seconds after which a measurement ends, even within a pass."""
LEAST_S = 1.0
"""Least seconds of a measurement, since two passes over a small table take only 0.1 s."""


class Rate(NamedTuple):
    """Speed and memory of a contender."""

    rows_s: float
    """Rows per second."""
    mb_s: float
    """Decoded megabytes per second."""
    peak_mb: float
    """Peak memory of the process plus that of its largest child, in MiB."""


def rate(batches: Iterator[int], num_rows: int, row_bytes: int) -> Rate:
    """Measure rows per second over at least two passes and ``LEAST_S`` seconds, after a first pass.

    Args:
        batches: yields the number of rows of each batch, pass after pass.
        num_rows: rows of a pass.
        row_bytes: bytes of a decoded row.
    """
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
    # RUSAGE_SELF would include the memory of the parent from which this process was forked before its exec.
    with open("/proc/self/status") as status:
        own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024
