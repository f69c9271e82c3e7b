"""``CallMemory``: finds unchanged data of the call, to which a snapshot refers instead of writing the data again."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lagom.errors import LagomError

_PIECE = 1 << 24


class CallMemory:
    """Compares buffers with the call's file.

    Args:
        payload_fd: the file that this process has mapped.
        open_kept: returns a descriptor of the kept call, to which snapshots refer; its bytes are mostly those of the
            mapped file.
    """

    def __init__(self, payload_fd: int, open_kept: Callable[[], int]) -> None:
        self._fd, self._open_kept = payload_fd, open_kept

    def split(self, buffers: Sequence[memoryview]) -> tuple[list[tuple[int, int] | None], list[memoryview]]:
        """Return for each buffer its offset and size in the kept call, or None; and the buffers without such a place.

        A buffer whose content has changed since it was mapped has no place.
        """
        ranges, kept = self._ranges(), self._kept_call()
        references: list[tuple[int, int] | None] = []
        own: list[memoryview] = []
        for buffer in buffers:
            place = _place(buffer, ranges)
            if place is None or kept is None or not _is_same(buffer, kept, place):
                references.append(None)
                own.append(buffer)
            else:
                references.append((place, buffer.nbytes))
        return references, own

    def join(self, references: Sequence[Any], own: Sequence[memoryview]) -> list[Any]:
        """Return all buffers in order: those at their places in the kept call, and ``own`` for references of None."""
        rest = iter(own)
        if all(one is None for one in references):
            return list(rest)
        with open(self._open_kept(), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(mapped)
        return [next(rest) if one is None else view[one[0] : one[0] + one[1]] for one in references]

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return where the call's file is mapped: begin and end in memory, and offset in the file."""
        found, status = [], os.fstat(self._fd)
        with open("/proc/self/maps") as maps:
            for line in maps:
                place, _, offset, _, inode, *_ = line.split(maxsplit=5)
                if int(inode) == status.st_ino:
                    begin, end = (int(one, 16) for one in place.split("-"))
                    found.append((begin, end, int(offset, 16)))
        return found

    def _kept_call(self) -> mmap.mmap | None:
        with suppress(OSError, ValueError, LagomError), open(self._open_kept(), "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return None


def _place(buffer: memoryview, ranges: Sequence[tuple[int, int, int]]) -> int | None:
    address = _address(buffer)
    for begin, end, offset in ranges:
        if begin <= address and address + buffer.nbytes <= end:
            return address - begin + offset
    return None


def _address(buffer: memoryview) -> int:
    if buffer.readonly:
        return -1
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _is_same(buffer: memoryview, kept: mmap.mmap, place: int) -> bool:
    flat = buffer.cast("B")
    for begin in range(0, flat.nbytes, _PIECE):
        piece = bytes(flat[begin : begin + _PIECE])
        if kept[place + begin : place + begin + len(piece)] != piece:
            return False
    return True
