"""``use_huge_pages``: makes this process cheap to fork. ``has_huge_pages``: whether ranks have them."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

_MADV_COLLAPSE = 25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    """Whether this system gives pages of 2 MB to those who ask, and the C library of this machine asks for them."""
    library, version = platform.libc_ver()
    is_given = _SETTING.exists() and "[never]" not in _SETTING.read_text()
    return is_given and library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)


def use_huge_pages() -> None:
    """Put this process's memory into pages of 2 MB, where the system can: a fork copies the table of all pages.

    A process of pytest with 380 MB has 95,000 small pages: a fork and the end of the child take 50 ms then, else 15 ms.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        is_own = access.startswith("rw-p") and inode == "0" and name in ([], ["[heap]"])
        start, end = (int(at, 16) for at in span.split("-"))
        if is_own and end - start >= 2 << 20:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
