"""``WorkerWatch``: notice side effects of a loader's workers, which ranks without workers would miss."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

from lagom.disk.install import asked_for_rank, report_changes, reports_changes
from lagom.forward.rows.surroundings import CACHE_FILES
from lagom.world import rank_calls_reported

if TYPE_CHECKING:
    from collections.abc import Callable

_STARTS = ("exec", "fork", "forkpty", "kill", "posix_spawn", "system")
PROGRAMS = frozenset(("subprocess.Popen", "signal.pthread_kill", *(f"os.{name}" for name in _STARTS)))
"""Audit events of signals, and of starting a program or a process, whose side effects are not watched."""
LOADER = "lagom.loader"
"""Audit event of the beginning of a loader's pass."""
FILE_CHANGES = frozenset(
    f"os.{name}"
    for name in ("chmod", "chown", "link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate", "utime")
)
"""Audit events of changed files and folders, besides "open"."""
_READ, _COPY = 1, 3
"""``mmap.ACCESS_READ`` and ``mmap.ACCESS_COPY``."""


def writes_file(path: Any, mode: Any, flags: Any) -> bool:
    """Return whether a file is opened to be written, by the arguments of the audit event "open"; not a cache's."""
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return bool(writes) and not any(part in str(path) for part in CACHE_FILES)


def is_local(address: Any) -> bool:
    """Return whether a socket's ``address`` may be on this host, where the program itself may serve it."""
    host = address[0] if isinstance(address, tuple) and address else address
    return not isinstance(host, str) or host.startswith(("/", "\0", "127.", "::1", "localhost"))


class WorkerWatch:
    """Tells the parent process whether a worker has changed anything outside of itself, or asked for its rank.

    Args:
        context: the ``multiprocessing`` context that starts the workers.
    """

    def __init__(self, context: Any) -> None:
        # Semaphores, since ``SharedMappings`` ignores them and would take shared memory for the program's.
        self._changes = context.Semaphore(0)
        self._rank_calls = context.Semaphore(0)

    @property
    def has_changed(self) -> bool:
        """Whether a worker may have changed a file, or memory or a process that is not its own."""
        return bool(self._changes.get_value())

    @property
    def has_asked(self) -> bool:
        """Whether a worker has asked for its rank."""
        return bool(self._rank_calls.get_value())

    def run(self, target: Callable[..., None], *args: Any) -> None:
        """Run ``target``, in a worker."""
        # The folder of multiprocessing's sockets, which do not count as changes. If the rank has not set the folder,
        # multiprocessing makes one with this prefix when it needs one.
        sockets = multiprocessing.current_process()._config.get("tempdir", "/pymp-")  # type: ignore[attr-defined]

        def note(path: str = "") -> None:
            if sockets not in path and not self.has_changed:
                self._changes.release()

        # Workers that are not forked have none of lagom's file calls, so Python's own opening of files is watched.
        is_forked = reports_changes()

        def audit(event: str, values: tuple[Any, ...]) -> None:
            if not is_forked and (event in FILE_CHANGES or (event == "open" and writes_file(*values))):
                note(str(values[0]))
            elif (
                event in PROGRAMS
                or (event == "mmap.__new__" and values[0] != -1 and values[2] not in (_READ, _COPY))
                or (event == "socket.connect" and is_local(values[1]))
            ):
                note()

        def asked() -> None:
            asked_for_rank()
            self._rank_calls.release()

        report_changes(note)
        sys.addaudithook(audit)
        with rank_calls_reported(asked):
            target(*args)


def run_watched(watch: WorkerWatch, target: Callable[..., None], *args: Any) -> None:
    """Run ``target`` in a worker that ``watch`` watches."""
    watch.run(target, *args)
