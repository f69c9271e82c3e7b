"""The fork server that the Python workers of a Spark executor share. See Note [One server for an executor]."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lagom.host.descendants import adopt_orphans, end_descendants, fork_host, reap_adopted
from lagom.host.forked_rank import open_pidfd
from lagom.host.workspace import locked_servers, remove_leftovers
from lagom.wire.client import DriverClient, LinkClosed, Message

MAX_FDS = 250  # files of one message; the kernel allows 253
_UNUSED_S = 60.0
"""Time from the end of the executor's last Python worker to the end of the server; Spark ends unused workers then."""
_LOOK_S = 1.0  # if the kernel does not report the end of a process
_PATIENCE_S = 1.5
"""Time for host processes to end by themselves."""


def main() -> None:
    """Serve until the executor's workers have ended.

    Arguments of the command: where lagom is, the listening socket, the workers' parent, the folder of the server.
    """
    from lagom.executor import task_host

    os.setpgid(0, 0)  # a signal to the group of Spark's daemon must not reach it; the daemon's end does
    listener, parent = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    adopt_orphans(True)
    server = _Server(listener, parent, task_host.run, _import_torch())
    server.serve(Path(sys.argv[4]))
    os._exit(0)  # nothing needs cleaning up, and Python's shutdown takes a second with torch imported


def _import_torch() -> str:
    """Import what ranks inherit; return why that is not possible, if so."""
    # Silences torch's warning about hosts without a name at each connection; torch reads the setting once.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.disable()  # collections would take a fourth of the time of these imports
    try:
        import lagom.host.preload  # noqa: F401
    except Exception as error:  # of a torch that is broken
        return f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    return ""


@dataclass(slots=True, eq=False)
class _Worker:
    """A Python worker of the executor, and the host process of its task, if it has one."""

    link: DriverClient
    host: int | None = None


class _Server:
    """Runs the event loop of the server: takes tasks from Python workers, and forks a host process for each."""

    def __init__(
        self, listener: socket.socket, parent: int, run: Callable[[Sequence[int]], None], problem: str
    ) -> None:
        self._listener = listener
        self._parent = parent
        self._run = run
        self._problem = problem
        self._unused_s = 0.0 if problem else _UNUSED_S  # the next call finds a torch that has been mended
        self._workers: list[_Worker] = []
        self._hosts: dict[int, tuple[int | None, _Worker]] = {}
        """The file that tells the end of each host process, and the worker of its task."""
        self._unused_since = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._parent_fd = open_pidfd(parent)
        self._parent_ended = False
        if self._parent_fd is not None:
            self._selector.register(self._parent_fd, selectors.EVENT_READ, self._see_parents_end)

    def serve(self, folder: Path) -> None:
        """Run the workers' tasks until the parent of all workers has ended, or no worker is left for a while."""
        while not self._retires(folder):
            for key, _ in self._selector.select(self._patience()):
                key.data()
            reap_adopted(self._hosts)
            for host in list(self._hosts):
                self._reap(host)
        self._selector.unregister(self._listener)
        for worker in list(self._workers):
            self._forget(worker)
        deadline = time.monotonic() + _PATIENCE_S
        while self._hosts and (left_s := deadline - time.monotonic()) > 0:
            self._selector.select(min(left_s, 0.1))
            for host in list(self._hosts):
                self._reap(host)
        _clean_up()

    def _see_parents_end(self) -> None:
        # Not by ``kill(pid, 0)``: in a container whose first process reaps nobody, an orphaned daemon stays a zombie.
        assert self._parent_fd is not None
        self._parent_ended = True
        self._selector.unregister(self._parent_fd)

    def _lives(self) -> bool:
        if self._parent_fd is None:
            try:
                os.kill(self._parent, 0)
            except ProcessLookupError:
                return False
        return not self._parent_ended

    def _patience(self) -> float | None:
        if self._parent_fd is None or any(pidfd is None for pidfd, _ in self._hosts.values()):
            return _LOOK_S
        return None if self._workers else max(0.0, self._unused_since + self._unused_s - time.monotonic())

    def _retires(self, folder: Path) -> bool:
        """Return whether nobody needs the server any more; if so, remove its folder, so that no worker connects."""
        if self._lives() and (self._workers or time.monotonic() < self._unused_since + self._unused_s):
            return False
        with contextlib.suppress(OSError), locked_servers():  # YARN may have removed the folder
            self._listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._accept()
            if self._lives() and self._workers:
                return False
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        worker = _Worker(DriverClient(connection))
        self._workers.append(worker)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._take(worker))

    def _take(self, worker: _Worker) -> None:
        """Begin the task that a worker has sent; end its task if the worker has ended."""
        try:
            data, fds, _, _ = socket.recv_fds(worker.link.socket, 1, MAX_FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._forget(worker)
        elif self._problem:
            self._reply(worker, {"problem": self._problem})
        else:
            self._fork(worker, fds)
        for fd in fds:
            os.close(fd)

    def _fork(self, worker: _Worker, fds: Sequence[int]) -> None:
        of_server = [self._listener.fileno(), *(other.link.fileno() for other in self._workers)]

        def run() -> None:
            for fd in of_server:
                os.close(fd)
            self._run(fds)

        try:
            host = fork_host(run)
        except OSError as error:  # the system has no more processes or memory
            self._reply(worker, {"refused": error.strerror})
            return
        self._reply(worker, {"began": True})
        worker.host, pidfd = host, open_pidfd(host)
        self._hosts[host] = pidfd, worker
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: None)

    def _forget(self, worker: _Worker) -> None:
        self._selector.unregister(worker.link.socket)
        worker.link.close()
        self._workers.remove(worker)
        self._unused_since = time.monotonic()
        if worker.host is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.host, signal.SIGTERM)  # as the kernel does when its parent ends: see fork_host

    def _reap(self, host: int) -> None:
        pid, status = os.waitpid(host, os.WNOHANG)
        if pid == 0:
            return
        pidfd, worker = self._hosts.pop(host)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
        if status != 0:
            _clean_up(self._hosts)
        worker.host = None
        if worker in self._workers:
            self._reply(worker, {"status": status})
        from lagom.host.preload import import_what_was_used  # loaded before this server took a task

        import_what_was_used()

    def _reply(self, worker: _Worker, message: Message) -> None:
        with contextlib.suppress(LinkClosed):  # the worker has ended, which its connection tells
            worker.link.send(message)


def _clean_up(kept: Collection[int] = ()) -> None:
    """End the processes, and remove the folders, that host processes have left; ``kept`` are those that go on."""
    end_descendants(kept)
    with contextlib.suppress(OSError):  # of a folder that cannot be made again, and so has nothing to remove
        remove_leftovers()


# Note [One server for an executor]
#
# Spark runs each task in a Python worker of its own. If each of these imported torch, an executor with 8 cores would
# import it 8 times, on first use at the same moment: 5 s of CPU time and 230 MB each. So the workers of an executor
# have one fork server (``executor_link.py`` starts it), which imports torch once; a task's host process is forked from
# it. The workers have one parent, Spark's daemon, by which they find the server.
#
# The server is started by a command, as the local one is, so that it can have what only an environment can say: that
# the C library takes large pages (docs/decisions/072-huge-pages.md).
#
# What ends with what: when a worker ends, as Spark ends it with its task, its connection breaks, and the server ends
# the task's host process. When the server ends, the kernel ends its host processes, and the connections tell the
# workers. The server ends with Spark's daemon, or a minute after the last worker.
