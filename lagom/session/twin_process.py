"""``RankTwins``: what a sleeping twin must know of a rank, to go on in its place."""

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
        """The system's number of the thread."""

    def still(self) -> AbstractContextManager[None]:
        """Hold the thread in a block."""

    def go_on(self, control: socket.socket) -> None:
        """Begin again in a process that has taken the place of the rank's."""


class RankTwins:
    """One rank with its ``session``; see ``TwinProcess`` in restart/sleeping_twin.py.

    Args:
        fds: descriptors that a twin keeps.
        outcome_fd: file for the rank's outcome.
        children: returns the rank's child processes.
        flush: writes out what the rank has printed.
        die_with: has this process end with another.
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
    """Return the files that are standard output and error, by device and inode."""
    return [(status.st_dev, status.st_ino) for status in map(os.fstat, (1, 2))]
