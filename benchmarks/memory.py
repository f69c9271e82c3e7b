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
    return sum(map(_private, family)) + _field(Path("/proc/meminfo"), "Shmem")


def _closed(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def _private(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    return _field(rollup, "Pss") - _field(rollup, "Pss_Shmem")


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it is gone


def _field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # the process is gone
    return 0


if __name__ == "__main__":
    watch(int(sys.argv[1]))
