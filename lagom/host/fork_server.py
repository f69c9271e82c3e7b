"""The local launcher's fork server: imports torch once, forks a process for each run, and ends with its driver."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import time

from lagom.errors import LagomError
from lagom.extensions.registry import host_server
from lagom.host.descendants import adopt_orphans, end_descendants, fork_host
from lagom.host.end_reports import fit_reports
from lagom.host.rank_host import run_task_ranks
from lagom.host.workspace import host_workspace, remove_leftovers
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.framing import receive_with_files
from lagom.wire.messages import Done, Lost
from lagom.wire.rendezvous import Stopped

_PATIENCE_S = 1.5
"""Time for host processes to end by themselves after the driver has ended."""


def serve(connection: socket.socket) -> None:
    """Answer requests until the driver closes ``connection``.

    A request is a pickle of a ``RunSpec`` and of the ranks' entries of ``visible_devices``, with the files of the run.
    SIGTERM ends the server after its last host process.
    """
    gc.disable()  # collections would take a fourth of the time of these imports
    import lagom.host.preload  # noqa: F401  (its imports are slow; forked processes inherit them)

    gc.enable()
    adopt_orphans(True)
    hosts = _Hosts()
    signal.signal(signal.SIGTERM, lambda *_: hosts.retire())
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not connection:
                    selector.unregister(key.fileobj)
                    hosts.forget_ended(key.fd)
                    continue
                try:
                    data, fds = receive_with_files(connection)
                except OSError:
                    data, fds = b"", []
                if not data:
                    hosts.end_all()
                    return
                pidfd = hosts.add(fork_host(functools.partial(_run_host, data, fds)))
                if pidfd is not None:
                    selector.register(pidfd, selectors.EVENT_READ)
                for fd in fds:
                    os.close(fd)


class _Hosts:
    """Tracks the host processes of this server; ends and removes what a killed one leaves behind."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._retires = False
        """Whether the server is to end after its last host process."""

    def retire(self) -> None:
        """End this process at once if it has no host process, else after the last one.

        A batch system sends SIGTERM to all processes of a job at once: the hosts need their server for a last snapshot.
        """
        self._retires = True
        if not self._pids:
            end_descendants()
            remove_leftovers()
            os._exit(0)

    def add(self, pid: int) -> int | None:
        """Record ``pid``; return a file that is readable after its end, or None if the system has no such files."""
        try:
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return None
        self._pids[pidfd] = pid
        return pidfd

    def forget_ended(self, pidfd: int) -> None:
        """Forget the ended process of ``pidfd``; end and remove what it left behind."""
        del self._pids[pidfd]
        os.close(pidfd)
        end_descendants(self._pids.values())
        remove_leftovers()
        if self._retires:
            self.retire()

    def end_all(self) -> None:
        """Wait for the host processes, which also see that the driver has ended; then end those that are left."""
        deadline = time.monotonic() + _PATIENCE_S
        with selectors.DefaultSelector() as selector:
            for pidfd in self._pids:
                selector.register(pidfd, selectors.EVENT_READ)
            while self._pids and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    selector.unregister(key.fileobj)
                    del self._pids[key.fd]
        end_descendants()
        remove_leftovers()


def _run_host(data: bytes, fds: list[int]) -> None:
    """Serve one run as its host process; ``fds`` are its link, its payload, and files for outcomes."""
    try:
        link = DriverClient(socket.socket(fileno=fds[0]))
        spec, gpus = pickle.loads(data)
        try:
            with host_workspace(spec, payload_fd=fds[1]) as place:
                if (serve := host_server(spec.plan)) is not None:
                    serve(spec, 0, place, link, "127.0.0.1", gpus)
                else:
                    reports = run_task_ranks(spec, 0, place, link, None, fds[2:], "127.0.0.1", gpus)
                    link.send(Done(reports=fit_reports(reports)))
        except (LagomError, OSError) as error:
            link.send(Lost(message=f"{type(error).__name__}: {error}"))
        except Stopped:
            pass
    except LinkClosed:
        pass  # the driver has ended


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    sys.path.pop(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended children
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # nothing needs cleaning up, and Python's shutdown takes a second with torch imported
