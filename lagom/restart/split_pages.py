"""``SplitPages``: huge pages of this process, which the system splits when they are written after a fork.

See Note [Split pages].
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

_POPULATE_WRITE, _COLLAPSE = 23, 25
"""Advice of ``madvise``: copy a page as a write would, and put small pages into huge ones; from Linux 5.14 and 6.1."""
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_HUGETLB = "glibc.malloc.hugetlb="
_OWN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 +(?:\[heap\])?$", re.MULTILINE)
"""Memory of this process alone, without a file, as the kernel lists it: where it begins and ends."""
_ENTRY_BYTES, _EXCLUSIVE = 8, np.uint64(1 << 56)
"""Of /proc/self/pagemap: bytes for a page, and the bit of a page that no other process has."""
_WRITTEN_PART = 0.5
"""Part of a block that has been written since the fork, from which on the whole block is copied."""
_LEAST_FAULTS = 2048
"""Copied pages from which on blocks are looked for: processors find the addresses of about as many small pages fast."""
_AT_ONCE = 512
"""Number of blocks whose pages are looked at together."""
_NOTED, _COPIED = 2, 6
"""Forks after which blocks are noted, and the next ones, after which blocks that were noted each time are copied; then
blocks are noted anew, since the program may write others."""
_LARGEST_BYTES = 32 << 20
"""Largest size of a huge page. With pages of 64 KB it is 512 MB, of which a process seldom writes the half."""
_LIBC = ctypes.CDLL(None)


class SplitPages:
    """Finds the blocks of memory that this process writes after a fork, and gives them huge pages again."""

    def __init__(self) -> None:
        self._block_bytes = _huge_page_bytes()
        self._mark = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        """A page that is written before a fork, and so is shared with it until the fork ends."""
        self._noted: list[set[int]] = []
        """Addresses of the blocks that were written soon after a fork, of up to ``_NOTED`` forks."""
        self._is_due = False
        """Whether no blocks have been joined since the last fork."""
        self._num_copied = self._faults = 0

    def before_fork(self) -> None:
        """Note that this process is about to fork."""
        self._mark[0] = 1

    def copy_written(self) -> None:
        """Copy, right after a fork, blocks that were written after earlier ones: each at once, not page by page."""
        if not self._block_bytes:
            return
        if len(self._noted) == _NOTED:
            with self._gives_up():
                self._copy(set.intersection(*self._noted))
        self._is_due, self._faults = True, _num_faults()

    def _copy(self, noted: set[int]) -> None:
        blocks = {block for blocks in self._blocks() for block in blocks if block in noted}
        for block in blocks:
            # A huge page is only copied as a whole once it is split: by the copy of its first page.
            _madvise(block, mmap.PAGESIZE, _POPULATE_WRITE)
        self._collapse(blocks)
        self._num_copied += 1
        if self._num_copied == _COPIED:
            self._num_copied = 0
            self._noted.clear()

    def join(self, *, is_over: bool = False) -> None:
        """Give a huge page to each block of which at least half has been written since the fork.

        Args:
            is_over: the fork has ended. As long as it lives, the first call alone does something: looking takes time.
        """
        if not self._block_bytes or not (self._is_due or is_over) or _num_faults() - self._faults < _LEAST_FAULTS:
            return
        with self._gives_up():
            found = set(self._exclusive())
            if not self._is_shared():  # no fork lives: all blocks are the process's alone, also those not written
                found &= set[int]().union(*self._noted)
            elif self._is_due and len(self._noted) < _NOTED:
                self._noted.append(found)
            self._collapse(found)
        self._is_due, self._faults = False, _num_faults()

    @contextmanager
    def _gives_up(self) -> Iterator[None]:
        """Do no more after an error: the system does not let this process see its pages."""
        try:
            yield
        except (OSError, ValueError):
            self._block_bytes = 0

    def _collapse(self, blocks: Iterable[int]) -> None:
        size, run = self._block_bytes, list[int]()
        for block in [*sorted(blocks), -1]:
            if run and block != run[-1] + size:
                _madvise(run[0], len(run) * size, _COLLAPSE)
                run = []
            run.append(block)

    def _exclusive(self) -> Iterator[int]:
        """Yield the blocks of which at least half the pages are this process's alone."""
        num_pages = self._block_bytes // mmap.PAGESIZE
        for blocks in self._blocks():
            is_exclusive = _are_exclusive(blocks[0], len(blocks) * num_pages).reshape(len(blocks), num_pages)
            for number in np.flatnonzero(is_exclusive.mean(1) >= _WRITTEN_PART):
                yield blocks[int(number)]

    def _is_shared(self) -> bool:
        """Return whether a fork lives; else all memory is the process's alone, written or not."""
        return not _are_exclusive(ctypes.addressof(ctypes.c_char.from_buffer(self._mark)), 1)[0]

    def _blocks(self) -> Iterator[range]:
        """Yield the addresses of the blocks of this process's own memory, at most ``_AT_ONCE`` at a time."""
        size, largest = self._block_bytes, mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES")
        for begin, end in _OWN.findall(Path("/proc/self/maps").read_text(errors="replace")):
            blocks = range(-(-int(begin, 16) // size) * size, int(end, 16) - size + 1, size)
            if len(blocks) * size <= largest:  # else addresses that a library has reserved
                yield from (blocks[at : at + _AT_ONCE] for at in range(0, len(blocks), _AT_ONCE))


def _huge_page_bytes() -> int:
    """Return the size of a huge page; 0 if this process's memory is not to be in huge pages, or cannot be joined."""
    try:
        chosen = (_SETTINGS / "enabled").read_text()
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        start = Path("/proc/self/environ").read_text(errors="replace")
    except (OSError, ValueError):
        return 0
    tunables = next((one for one in start.split("\0") if one.startswith("GLIBC_TUNABLES=")), "")
    asked = [one for one in tunables.partition("=")[2].split(":") if one.startswith(_HUGETLB)]
    is_asked = bool(asked) and asked[-1] != f"{_HUGETLB}0"
    is_wanted = "[always]" in chosen or ("[madvise]" in chosen and is_asked)
    # Advice that the system does not know is an error, also for no memory at all.
    is_known = is_wanted and _madvise(0, 0, _COLLAPSE) == 0
    return size if is_known and size <= _LARGEST_BYTES else 0


def _are_exclusive(start: int, num_pages: int) -> npt.NDArray[np.bool_]:
    """Return, for each page from the address ``start`` on, whether it is this process's alone."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(start // mmap.PAGESIZE * _ENTRY_BYTES)
        entries = np.frombuffer(pages.read(num_pages * _ENTRY_BYTES), np.uint64)
    return np.asarray((entries & _EXCLUSIVE) != 0)


def _madvise(start: int, size: int, advice: int) -> int:
    """Give advice, and return 0 or -1: the system may have no huge page left, or the memory may be gone."""
    return int(_LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice))


def _num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# Note [Split pages]
#
# A rank's large tensors are in huge pages, mostly of 2 MB (docs/decisions/072-huge-pages.md). A fork shares them. When
# the rank then writes to one, Linux maps it in small pages and copies these one by one as they are written. They stay
# small, also when the fork has ended: steps with 100 MB of state took 2 to 12% more time from then on.
#
# MADV_COLLAPSE copies a block of small pages into a huge page, in the kernel, so no other thread can come in between.
# It is called for blocks that the process has mostly written since the fork (`join`), so it needs next to no additional
# memory. /proc/self/pagemap tells which pages are the process's alone: those that it has written, as long as the fork
# lives. When it has ended, only blocks that were noted before are joined, so that data which the program only reads is
# never copied.
#
# Blocks that were written soon after two forks are copied at once after the next ones (`copy_written`), before they are
# written: one copy of 2 MB instead of 512 of 4 KB and one of 2 MB, which takes a third of the time.
