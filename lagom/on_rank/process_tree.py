"""Child processes of a process, by Linux's /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started or adopted, and not yet reaped; empty if ``pid`` has ended."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found
