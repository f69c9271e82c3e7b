"""``wanted_bytes``: recognises out-of-memory errors."""

from __future__ import annotations

import re

import torch

_CPU = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes")
_ACCELERATOR = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def wanted_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed allocation, 0 if the out-of-memory error has no size, None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        found = _ACCELERATOR.search(str(error))
        return int(float(found[1]) * _UNITS.get(found[2], 1)) if found else 0
    if isinstance(error, MemoryError):
        return 0
    # Read the text of a RuntimeError only: another class's ``__str__`` may run any code.
    found = _CPU.search(str(error)) if type(error) is RuntimeError else None
    return int(found[1]) if found else None
