"""``StoppedProcesses``: notices processes of this machine that are stopped, without which a run gets nowhere."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

STOPPED = ("T", "t")
"""States of a process that SIGSTOP or a debugger has stopped."""
_NAMED_AFTER_S = 3.0
"""Seconds after which the user is told: a shell may stop and continue a process at once."""


class _Process(NamedTuple):
    what: str
    limit_s: float | None
    rank: int | None


class StoppedProcesses:
    """Compares the time for which a process has been stopped, by SIGSTOP or a debugger, with its limit."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._since: dict[int, float] = {}
        self._named: set[int] = set()

    def add(self, pid: int, what: str, limit_s: float | None, rank: int | None = None) -> None:
        """Watch ``pid`` too.

        Args:
            what: the process in the text, such as "the host process of ranks 0-1".
            limit_s: how long it may be stopped; None for ever.
            rank: first rank that depends on it; None if none does yet.
        """
        self._processes[pid] = _Process(what, limit_s, rank)

    def forget(self, pid: int) -> None:
        """Watch ``pid`` no longer."""
        self._processes.pop(pid, None)

    def look(self) -> list[str]:
        """Return texts for the user about processes that have been stopped for a while, or that go on again."""
        texts = []
        for pid, process in self._processes.items():
            if state_letter(pid) not in STOPPED:
                self._since.pop(pid, None)
                if pid in self._named:
                    self._named.discard(pid)
                    texts.append(f"{process.what} (process {pid}) goes on again")
                continue
            since = self._since.setdefault(pid, time.monotonic())
            if pid not in self._named and time.monotonic() - since >= _NAMED_AFTER_S:
                self._named.add(pid)
                texts.append(self._text(pid))
        return texts

    def overdue(self) -> tuple[int, int | None, str] | None:
        """Return the process that has been stopped for longer than its limit, its first rank, and the text."""
        for pid, since in self._since.items():
            process = self._processes.get(pid)
            if process is not None and process.limit_s is not None and time.monotonic() - since >= process.limit_s:
                return pid, process.rank, self._text(pid)
        return None

    def _text(self, pid: int) -> str:
        return (
            f"{self._processes[pid].what} (process {pid}) has been stopped for "
            f"{time.monotonic() - self._since[pid]:.0f} s, by SIGSTOP or a debugger; kill -CONT {pid} lets it go on"
        )


def state_letter(pid: int) -> str:
    """Return the kernel's letter for the state of the process ``pid`` of this machine; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kill_unless_needed(pid: int, rank: int | None) -> None:
    """Kill a stopped process, so that what depends on it ends; but not a fork server on which other runs depend."""
    with contextlib.suppress(OSError):
        if rank is None and Path(f"/proc/{pid}/task/{pid}/children").read_text().strip():
            return
        os.kill(pid, signal.SIGKILL)
