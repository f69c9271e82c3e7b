"""``RunLease``: says at a URL which process goes on with a run, so that no second one does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

from lagom.errors import LagomError

RENEWED_S, LASTS_S = 10.0, 60.0
"""Seconds between renewals of a lease, and for which it holds: two machines' clocks may differ by half a minute."""
SETTLE_S = 0.5
"""Shortest time in seconds after which a process looks whether another one has taken the lease at the same moment."""

_PATIENCE_S = 5.0
"""Longest time to wait for a write of the lease when the run has ended."""

log = logging.getLogger("lagom")


class RunLease:
    """A file at the URL of a run that names the process which goes on with the run.

    Args:
        system: file system of fsspec.
        path: path of the file in ``system``.
        url: URL of the run, for messages.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system, self._path, self._url = system, path, url
        self._own = {"id": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid(), "on": _machine()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lagom-lease", daemon=True)
        self._is_taken = False
        self.is_lost = False
        """Whether another process has taken the lease."""

    def take(self) -> None:
        """Take the lease, and renew it from now on.

        Raises:
            LagomError: if another process holds it, or has taken it at the same moment.
            Exception: the file system's error.
        """
        lease = self._read()
        left_s = lease.get("until", 0.0) - time.time()
        if left_s > 0 and not _has_ended(lease):
            raise LagomError(
                f"the run at {self._url} is going on in process {lease['pid']} on {lease['host']}, or was lately; if "
                f"that process is dead, call again in {left_s:.0f} s"
            )
        began, self._is_taken = time.monotonic(), True
        self._write()
        time.sleep(SETTLE_S + 2 * (time.monotonic() - began))
        if (other := self._read()).get("id") != self._own["id"]:
            raise LagomError(f"process {other.get('pid')} on {other.get('host')} goes on with the run at {self._url}")
        self._thread.start()

    def check(self) -> None:
        """Set ``is_lost`` if another process has taken the lease, as while this one was cut off or suspended."""
        if not self.is_lost and self._read().get("id", self._own["id"]) != self._own["id"]:
            self.is_lost = True
            log.warning("another process goes on with the run at %s: this one copies nothing there any more", self._url)

    def release(self) -> None:
        """Give the lease up, so that another process can take it."""
        self._over.set()
        if not self._is_taken:
            return
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)
        with contextlib.suppress(Exception):  # then the lease ends by itself
            self.check()
            if not self.is_lost:
                remove(self._system, self._path)

    def _renew(self) -> None:
        while not self._over.wait(RENEWED_S):
            with contextlib.suppress(Exception):  # the next try may succeed
                self.check()
                if not self.is_lost:
                    self._write()

    def _write(self) -> None:
        self._system.pipe_file(self._path, json.dumps(self._own | {"until": time.time() + LASTS_S}).encode())

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; an empty dict if there is no file."""
        with contextlib.suppress(FileNotFoundError):
            try:
                return self._content()
            except ValueError:  # half of the content: some file systems show files that are being written
                time.sleep(SETTLE_S)
                return self._content()
        return {}

    def _content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._system.cat_file(self._path))
        return found


def remove(system: Any, path: str) -> None:
    """Remove a file of ``system``; not all file systems of fsspec have ``rm_file``."""
    try:
        system.rm_file(path)
    except (AttributeError, NotImplementedError):
        system.rm(path)


def _machine() -> str:
    """Return a name of this machine and of its process ids, which a container may have of its own."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _has_ended(found: dict[str, Any]) -> bool:
    """Return whether the process that wrote ``found`` ran on this machine and has ended."""
    return found.get("on") == _machine() != "" and not os.path.exists(f"/proc/{found['pid']}")
