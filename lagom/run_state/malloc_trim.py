"""``trim_heap``: returns to the system the free memory that the C library keeps."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Return malloc's free memory to the system; do nothing without glibc.

    With ``zero_lvl=3``, freed parameters of equal size, with smaller blocks between them, leave holes into which no
    other parameter fits: without trimming, a process takes as much memory as the whole model. A call takes 0.1 ms, and
    later the system takes time to provide new pages.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc only
    except (OSError, AttributeError):
        return None
