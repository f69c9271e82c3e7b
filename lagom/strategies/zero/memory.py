"""``give_back_memory``: what the C library keeps for later goes back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back_memory() -> None:
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
