"""``softly_terminated``: lets SIGTERM end a run as Ctrl-C does, after a last snapshot. See Note [Termination]."""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lagom.errors import Terminated


@contextmanager
def softly_terminated(leave: Callable[[], bool]) -> Iterator[None]:
    """Context manager of a run that SIGTERM ends; outside the main thread, or if the program handles it, do nothing.

    Args:
        leave: ends the ranks, after a snapshot; returns False if there are none. Called in another thread.

    Raises:
        Terminated: when the context ends after a SIGTERM; at once at a second one, or if there are no ranks.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _forks_end_at_sigterm()
    handler = _Handler(leave)
    thread = threading.Thread(target=handler.wait, name="lagom-leave", daemon=True)
    thread.start()
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        try:
            handler.told.put(False)
            thread.join()
        finally:
            if signal.getsignal(signal.SIGTERM) is handler:  # else the program has set one meanwhile
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if handler.is_told:
        raise Terminated


class _Handler:
    """Handler of SIGTERM: has another thread end the ranks, and raises ``Terminated`` at a second signal."""

    def __init__(self, leave: Callable[[], bool]) -> None:
        self._leave = leave
        self.told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put into it at any moment
        self.is_told = False

    def __call__(self, *_: Any) -> None:
        if self.is_told:
            raise Terminated
        self.is_told = True
        self.told.put(True)

    def wait(self) -> None:
        """End the ranks when a signal has come; return then, or when the run has ended."""
        if self.told.get() and not self._leave():
            os.kill(os.getpid(), signal.SIGTERM)


@functools.cache
def _forks_end_at_sigterm() -> None:
    """Let SIGTERM end the forks of this process, such as those of a pool, as without lagom."""

    def restore() -> None:
        if isinstance(signal.getsignal(signal.SIGTERM), _Handler):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


# Note [Termination]
#
# Kubernetes, Docker, systemd and batch systems end a process by SIGTERM, and kill it some seconds later: Docker after
# 10, Kubernetes and Slurm after 30. In the driver's process the signal has rank 0 take a snapshot at the next batch
# (``RunView.leave``). When the snapshot is in its place, or after ``LEAVE_SNAPSHOT_S`` in driver/departure.py, the
# ranks are stopped, and ``Terminated`` is raised. Rank 0 learns that a snapshot is wanted from a byte of memory that it
# shares with its host process: the program may have its own use for signals, and the rank reads its connection only for
# answers.
