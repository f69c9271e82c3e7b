"""Measures the memory that a process and all its descendants add at the peak, from another process (this script).

It counts the proportional set size (PSS), in which a page that several processes map counts once in total, and all
shared memory, mapped or not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], int]]:
    """Watch memory during a block. Yields a function that returns, after the block, the bytes added at the peak."""
    added: list[int] = []
    command = [sys.executable, __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        try:
            yield lambda: added[0]
        finally:
            added.append(int(watcher.communicate()[0]))


def watch(pid: int) -> None:
    """Sample the memory of ``pid`` until stdin closes, then print the bytes added at the peak."""
    os.set_blocking(sys.stdin.fileno(), False)
    base = peak = memory(pid)
    print("watching", flush=True)
    while not _closed(sys.stdin.fileno()):
        peak = max(peak, memory(pid))
        time.sleep(0.02)
    print(peak - base)


def memory(root: int) -> int:
    """Return the bytes that ``root`` and its descendants hold, without this process."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    family: set[int] = set()
    found = {root}
    while found:
        family |= found
        found = {pid for pid, parent in parents.items() if parent in family} - family - {os.getpid()}
    return sum(map(_private, family)) + _fields(Path("/proc/meminfo"))["Shmem"]


def _closed(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def _private(pid: int) -> int:
    # Both values come from one reading: between two readings a process may unmap shared memory.
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return rollup.get("Pss", 0) - rollup.get("Pss_Shmem", 0)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # the process has ended


def _fields(path: Path) -> dict[str, int]:
    """Return the values in a file of ``name: number kB`` lines, in bytes; empty if the process has ended."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


if __name__ == "__main__":
    watch(int(sys.argv[1]))
