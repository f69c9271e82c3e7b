"""Kills of a rank, or of the driver, once there is a snapshot in the second epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.extensions.resume.training import newest

PATIENCE_S = 100.0


def wait_for_snapshot(folder: Path) -> None:
    """Wait for a snapshot in the middle of the second epoch."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        epoch, step = newest(folder).get("place", [0, 0])
        if epoch == 2 and step >= 1:
            return
        assert epoch < 3, "the program was too fast"
        time.sleep(0.01)
    raise AssertionError(f"no snapshot: {[path.read_text() for path in folder.glob('runs/*/run.json')]}")


def wait_until_late(folder: Path) -> None:
    """Wait for a snapshot, tell the program so, and wait until it has gone on for some batches."""
    wait_for_snapshot(folder)
    (folder / "seen").touch()
    end = time.monotonic() + PATIENCE_S
    while not (folder / "late").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def killed(
    folder: Path,
    rank: int,
    wait: Callable[[Path], None] = wait_for_snapshot,
    pid_of: Callable[[str, int], int] = lambda host, pid: pid,
) -> Iterator[None]:
    """Kill a rank from outside once there is a snapshot in the second epoch, or after another ``wait``.

    Args:
        pid_of: returns the id here of a process of another host.
    """

    def kill() -> None:
        wait(folder)
        (path,) = folder.glob("runs/*/run.json")
        (folder / "slowly").unlink()
        process = json.loads(path.read_text())["ranks"][str(rank)]
        os.kill(pid_of(process["host"], process["pid"]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


def kill_driver(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    wait: Callable[[Path], None] = wait_for_snapshot,
) -> None:
    """Start a run in ``folder`` by ``command``, and kill its driver once there is a snapshot in the second epoch."""
    (folder / "slowly").touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=folder)
    try:
        wait(folder)
    finally:
        process.kill()
        process.communicate()
    (folder / "slowly").unlink()
