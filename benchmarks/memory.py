"""Memory that a process and all its descendants add, watched from outside. Runs as a script of its own.

Counted is the proportional set size (PSS), in which a page that several processes map counts once in all, and
shared memory whether it is mapped or not.
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
    """Gives a function that says, after the block, how many bytes more than before it there were at the peak."""
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
    """Sample ``pid`` until stdin closes, then print the bytes added at the peak."""
    os.set_blocking(sys.stdin.fileno(), False)
    base = peak = memory(pid)
    print("watching", flush=True)
    while not _closed(sys.stdin.fileno()):
        peak = max(peak, memory(pid))
        time.sleep(0.02)
    print(peak - base)


def memory(root: int) -> int:
    """Bytes held by ``root`` and its descendants, this process left out."""
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
    # Both from one reading: between two, a process may unmap what is shared.
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return rollup.get("Pss", 0) - rollup.get("Pss_Shmem", 0)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it is gone


def _fields(path: Path) -> dict[str, int]:
    """Those of a file of ``name: number kB`` lines, in bytes; none when the process is gone."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


if __name__ == "__main__":
    watch(int(sys.argv[1]))
