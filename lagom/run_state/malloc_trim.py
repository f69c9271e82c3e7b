"""``trim_heap``: what the C library keeps for later goes back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Have malloc return what is free; where it cannot, nothing happens.

    Parameters of one size, made one after another with smaller ones between them, leave holes that none of them fits
    in: without this a process takes as much as the whole model. 0.1 ms, and later the system's time for new pages.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc's
    except (OSError, AttributeError):
        return None


def map_large_blocks() -> None:
    """Have malloc map what takes 1 MB and more by itself from now on, and return what is free.

    From its heap glibc gives aligned memory, as tensors have, hardly ever where some of the same size was freed. Steps
    take longer, as the system clears pages each time.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    except (OSError, AttributeError):
        return
    trim_heap()


_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
