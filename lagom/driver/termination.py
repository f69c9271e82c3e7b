"""``softly_terminated``: lets SIGTERM end a run as Ctrl-C does, after a last snapshot. See Note [Termination]."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lagom.errors import Terminated
from lagom.plan import Plan
from lagom.wire.rendezvous import REPEATED_S

_AGAIN_S = 0.05
"""Seconds after which the main thread is told again to end the run."""


@contextmanager
def softly_terminated(plan: Plan) -> Iterator[Termination]:
    """Context manager of a run, with its records, that SIGTERM ends.

    Do nothing outside the main thread, if the program handles SIGTERM, and for inline runs, which are a part of it.

    Raises:
        Terminated: when the context ends after a SIGTERM; at once at a second one, or if there are no ranks.
    """
    termination = Termination()
    is_main = threading.current_thread() is threading.main_thread()
    if plan.launcher == "inline" or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield termination
        return
    _forks_end_at_sigterm()
    thread = threading.Thread(target=termination.wait, name="lagom-leave", daemon=True)
    thread.start()
    signal.signal(signal.SIGTERM, termination)
    try:
        yield termination
    finally:
        try:
            termination.told.put(False)
            thread.join()
        finally:
            if signal.getsignal(signal.SIGTERM) is termination:  # else the program has set one meanwhile
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if termination.is_told:
        raise Terminated


class Termination:
    """Handler of SIGTERM: has another thread end the ranks, and raises ``Terminated`` at a second signal."""

    def __init__(self) -> None:
        self.leave: Callable[[], bool] = lambda: False
        """Ends the ranks, after a snapshot; returns False if there are none. Called in another thread."""
        self.told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a signal handler may put into it at any moment
        self.is_told = False
        """Whether SIGTERM has come. The handler sets this in the main thread."""
        self._told_at = 0.0
        self._has_ranks, self._has_raised = True, False

    def __call__(self, *_: Any) -> None:
        now = time.monotonic()
        if not self.is_told:
            self.is_told, self._told_at = True, now
            self.told.put(True)
        elif not self._has_ranks or now - self._told_at > REPEATED_S:
            self._has_raised = True
            raise Terminated

    def wait(self) -> None:
        """End the ranks when a signal has come; return then, or when the run has ended."""
        if self.told.get():
            self._has_ranks = self.leave()
            main = threading.main_thread().ident
            assert main is not None
            # A signal that comes just before a system call does not interrupt it, so one signal may not be enough.
            while not self._has_ranks and not self._has_raised:
                signal.pthread_kill(main, signal.SIGTERM)
                with contextlib.suppress(queue.Empty):
                    self.told.get(timeout=_AGAIN_S)
                    return


@functools.cache
def _forks_end_at_sigterm() -> None:
    """Let SIGTERM end the forks of this process, such as those of a pool, as without lagom."""

    def restore() -> None:
        if isinstance(signal.getsignal(signal.SIGTERM), Termination):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


# Note [Termination]
#
# Kubernetes, Docker, systemd and batch systems end a process by SIGTERM, and kill it some seconds later: Docker after
# 10, Kubernetes and Slurm after 30. In the driver's process the signal has rank 0 take a snapshot at the next batch
# (``RunView.leave``). When the snapshot is in its place, or after ``LEAVE_SNAPSHOT_S`` in wire/snapshot_messages.py,
# the ranks are stopped, and ``Terminated`` is raised. Rank 0 learns that a snapshot is wanted from a byte of memory
# that it shares with its host process: the program may have its own use for signals, and the rank reads its connection
# only for answers.
#
# One notice can come as two signals: ``timeout`` of coreutils sends SIGTERM to its child, and then to the child's
# group. So a signal that follows another within ``REPEATED_S`` is the same notice; a later one ends the process at
# once.
#
# A run may end before it hears of the signal, or before the snapshot. If it has returned, its result is recorded as
# always, and ``Terminated`` is raised then. If it has lost a rank, no further attempt begins.
