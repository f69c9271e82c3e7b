"""``SharedMappings``, ``find_files``: memory of this process that other processes may read and write."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable

_HARMLESS = re.compile(r"/dev/shm/sem\.|/dev/shm/nccl|/dev/nvidia|lagom")
"""Names that do not count: semaphores (found by ``shared_objects.py``), and memory of lagom and of drivers."""
_BATCH = re.compile(r"/torch_(\d+)_")
"""Names of storages that torch shares; the group is the id of the process that made the storage."""


class SharedMappings:
    """Detects writable shared memory that was mapped into this process after this object was made."""

    def __init__(self) -> None:
        self._before = _find()

    def has_new(self) -> bool:
        """Return whether new shared memory was mapped, other than batches that workers have sent."""
        return not _find() <= self._before


def find_files(addresses: Iterable[int]) -> set[tuple[str, ...]]:
    """Return device and inode of each shared mapping that contains one of ``addresses``."""
    wanted = sorted(addresses)
    found: set[tuple[str, ...]] = set()
    for row in _shared_rows():
        low, high = (int(one, 16) for one in row[0].split("-"))
        if bisect_left(wanted, low) < bisect_left(wanted, high):
            found.add((row[3], row[4]))
    return found


def _find() -> set[tuple[str, ...]]:
    found = {(row[3], row[4], row[-1]) for row in _shared_rows() if not _HARMLESS.search(row[-1])}
    return {row for row in found if (made := _BATCH.search(row[-1])) is None or int(made[1]) == os.getpid()}


def _shared_rows() -> list[list[str]]:
    try:
        with open("/proc/self/maps") as file:
            return [line.rstrip().split(None, 5) for line in file if " rw-s " in line]
    except OSError:  # not on Linux
        return []
