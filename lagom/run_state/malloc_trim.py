"""``trim_heap``: return memory that the C library keeps to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Have malloc return free memory to the system; do nothing where malloc cannot.

    Parameters of one size, allocated one after another with smaller ones between them, leave holes that no parameter
    fits in: without trimming, a process takes as much memory as the whole model. A call takes 0.1 ms, and later the
    system's time to provide new pages.
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


def map_large_blocks() -> None:
    """Have malloc map blocks of 1 MB and more separately from now on, and return free memory.

    Tensors want aligned memory, and glibc's heap hardly ever reuses a freed block of the same size for an aligned one.
    Steps take longer, as the system clears the pages each time.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    except (OSError, AttributeError):
        return
    trim_heap()


_M_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's malloc.h."""
