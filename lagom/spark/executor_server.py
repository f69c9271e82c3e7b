"""The fork server that the Python workers of a Spark executor share. See Note [One server for an executor]."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from lagom.host.descendants import END, adopt_orphans, end_descendants, fork_host, reap_adopted
from lagom.host.forked_rank import open_pidfd
from lagom.host.workspace import locked_servers, remove_leftovers
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Message, TaskBegan, TaskEnded, TaskRefused, TorchMissing

MAX_FDS = 250  # descriptors in one message; the kernel allows 253
_UNUSED_S = 60.0
"""Seconds for which the server outlives the executor's last Python worker; Spark keeps unused workers as long."""
_LOOK_S = 1.0  # interval of checks for ended processes, if the kernel has no pidfds that report them
_PATIENCE_S = 1.5
"""Seconds in which host processes must end by themselves when the server ends."""


def main() -> None:
    """Serve until the executor's workers have ended.

    ``sys.argv[1:]`` has the folder of lagom, the descriptor of the listening socket, the pid of the workers' parent and
    the server's folder.
    """
    from lagom.spark import task_host

    os.setpgid(0, 0)  # a signal to the process group of Spark's daemon must not end this server
    listener, parent = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    adopt_orphans(True)
    server = _ExecutorServer(listener, parent, task_host.run, _import_torch())
    server.serve(Path(sys.argv[4]))
    os._exit(0)  # nothing needs cleaning up, and Python's shutdown takes a second with torch imported


def _import_torch() -> str:
    """Import the modules that ranks inherit; return the error as a text, "" if there is none."""
    # Silence torch's warning, at each connection, about hosts without a name. torch reads the setting at its import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.disable()  # garbage collections would take a quarter of the time of these imports
    try:
        import lagom.host.preload  # noqa: F401
    except Exception as error:  # a broken installation of torch may raise any error
        return f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    return ""


@dataclass(slots=True, eq=False)
class _Worker:
    """A Python worker of the executor, and the host process of its task, if it has one."""

    link: DriverClient
    host: int | None = None


class _ExecutorServer:
    """Runs the event loop of the server: takes tasks from Python workers, and forks a host process for each."""

    def __init__(
        self, listener: socket.socket, parent: int, run: Callable[[Sequence[int]], None], problem: str
    ) -> None:
        self._listener = listener
        self._parent = parent
        self._run = run
        self._problem = problem
        self._unused_s = 0.0 if problem else _UNUSED_S  # end soon, so that the next call finds a repaired torch
        self._workers: list[_Worker] = []
        self._hosts: dict[int, tuple[int | None, _Worker]] = {}
        """For each host process its pidfd, which is readable once the process has ended, and the worker of its task."""
        self._unused_since = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._parent_fd = open_pidfd(parent)
        self._parent_ended = False
        if self._parent_fd is not None:
            self._selector.register(self._parent_fd, selectors.EVENT_READ, self._see_parents_end)

    def serve(self, folder: Path) -> None:
        """Run the workers' tasks until the parent of the workers has ended, or ``_UNUSED_S`` after the last worker.

        Without torch, end with the last worker.
        """
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
        # ``kill(pid, 0)`` does not show this: in a container whose init process reaps no orphans, an ended daemon stays
        # a zombie.
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
        with contextlib.suppress(OSError), locked_servers():  # OSError: YARN may have removed the folder
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
        """Start the task that ``worker`` has sent; if the worker has ended, end its running task."""
        try:
            data, fds, _, _ = socket.recv_fds(worker.link.socket, 1, MAX_FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._forget(worker)
        elif self._problem:
            self._reply(worker, TorchMissing(problem=self._problem))
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
            self._reply(worker, TaskRefused(why=error.strerror or str(error)))
            return
        self._reply(worker, TaskBegan())
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
                os.kill(worker.host, END)

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
            self._reply(worker, TaskEnded(status=status))

    def _reply(self, worker: _Worker, message: Message) -> None:
        with contextlib.suppress(LinkClosed):  # the worker has ended: ``_take`` notices this
            worker.link.send(message)


def _clean_up(kept: Collection[int] = ()) -> None:
    """End the processes and remove the folders that ended host processes have left; spare the processes ``kept``."""
    end_descendants(kept)
    with contextlib.suppress(OSError):  # the base folder is gone and cannot be made again: nothing is left to remove
        remove_leftovers()


# Note [One server for an executor]
#
# Spark runs each task in a Python worker of its own. If each worker imported torch, an executor with 8 cores would
# import it 8 times, on first use at the same moment: 5 s of CPU time and 230 MB each. So the workers of an executor
# share one fork server (``executor_link.py`` starts it), which imports torch once and forks the host process of each
# task. All workers are children of Spark's daemon, and find the server by the daemon's pid.
#
# The server is started by a command, like the local fork server, because a setting that only the environment of a new
# process can give must be in effect: the C library's use of large pages (docs/decisions/072-huge-pages.md).
#
# Order of ends: when a worker ends (Spark may end it with its task), its connection closes, and the server ends the
# task's host process. When the server ends, the kernel ends the host processes, and the workers notice it by their
# connections. The server ends with Spark's daemon, or a minute after the last worker. Workers whose daemon was killed
# have a server each, which ends with the worker (``_owner`` in executor_link.py).
