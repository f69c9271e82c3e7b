"""``RankTwins``: the facts and actions of one rank that its sleeping twins need (restart/sleeping_twin.py)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from lagom.files.install import knows_rank
from lagom.restart.open_files import NoTwinError

if TYPE_CHECKING:
    from lagom.session.session import Session


class ReportingThread(Protocol):
    """The thread that reports to the host process."""

    @property
    def fd(self) -> int:
        """The descriptor of the thread's connection."""

    @property
    def thread(self) -> int | None:
        """The operating system's id of the thread."""

    def still(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the thread from sending."""

    def go_on(self, control: socket.socket) -> None:
        """Start the thread again in a twin that has replaced the rank's process, with the connection ``control``."""


class RankTwins:
    """Implements ``TwinProcess`` of restart/sleeping_twin.py for the rank of ``session``.

    Args:
        heart: the thread that reports to the host process.
        fds: descriptors that a twin keeps.
        outcome_fd: descriptor of the file for the rank's outcome.
        children: returns the ids of the child processes of the process with a given id.
        flush: flushes standard output and error.
        die_with: makes the kernel kill this process when the given parent process ends.
    """

    def __init__(
        self,
        session: Session,
        heart: ReportingThread,
        fds: Collection[int],
        outcome_fd: int,
        children: Callable[[int], Sequence[int]],
        flush: Callable[[], None],
        die_with: Callable[[int], None],
    ) -> None:
        self._session, self._heart, self._fds, self._outcome_fd = session, heart, fds, outcome_fd
        self._children, self._flush, self._die_with = children, flush, die_with
        self._output = _output()

    def num_backwards(self) -> int:
        return self._session.divergence.num_steps if self._session.divergence is not None else 0

    def position(self) -> Sequence[int | None]:
        progress = self._session.passes.progress
        return progress["epoch"], progress["step"]

    def check(self) -> None:
        session = self._session
        if _output() != self._output:
            raise NoTwinError("the program has put another file in the place of its output")
        if session.has_joined:
            raise NoTwinError("the program is distributed already")
        if knows_rank():
            raise NoTwinError("the program has asked for its rank, so ranks may be at different places")
        if session.group is None or not session.group.only_memory:
            raise NoTwinError("ranks exchange by more than shared memory")

    def threads(self) -> Collection[int | None]:
        group = self._session.group
        return [self._heart.thread, group.thread if group is not None else None]

    def children(self) -> Sequence[int]:
        return self._children(os.getpid())

    def own_fds(self) -> Collection[int]:
        return [*self._fds, self._heart.fd, self._outcome_fd]

    @contextmanager
    def still(self) -> Iterator[None]:
        with self._heart.still():
            self._flush()
            yield

    def go_on(self, control: socket.socket) -> None:
        self._die_with(os.getppid())
        self._output = _output()
        os.ftruncate(self._outcome_fd, 0)
        os.lseek(self._outcome_fd, 0, os.SEEK_SET)
        self._session.live = True
        self._heart.go_on(control)

    def meet(self) -> None:
        assert self._session.group is not None
        self._session.group.reconnect()


def _output() -> list[tuple[int, int]]:
    """Return device and inode of the files of standard output and standard error."""
    return [(status.st_dev, status.st_ino) for status in map(os.fstat, (1, 2))]
