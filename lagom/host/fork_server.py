"""The local launcher's fork server: torch imported once, a forked process for each run, gone with its driver."""

from __future__ import annotations

import functools
import os
import pickle
import selectors
import signal
import socket
import sys
import time

from lagom.errors import LagomError
from lagom.host.descendants import adopt_orphans, end_descendants, fork_host
from lagom.host.rank_host import hold_ranks
from lagom.host.workspace import host_workspace, remove_leftovers
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.rendezvous import Stopped

MAX_FDS = 250  # of one message; the kernel allows 253
_PATIENCE_S = 1.5
"""For host processes to end by themselves when the driver is gone."""


def serve(connection: socket.socket) -> None:
    """Answer requests until the driver is gone; each is a ``Spec`` and the files of its run."""
    import lagom.host.preload  # noqa: F401  (what makes a fresh interpreter slow; forked processes have it)

    adopt_orphans(True)
    hosts = _Hosts()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not connection:
                    selector.unregister(key.fileobj)
                    hosts.bury(key.fd)
                    continue
                try:
                    data, fds, _, _ = socket.recv_fds(connection, 1 << 22, MAX_FDS)
                except OSError:
                    data, fds = b"", []
                if not data:
                    hosts.leave()
                    return
                pidfd = hosts.add(fork_host(functools.partial(_attend, data, fds)))
                if pidfd is not None:
                    selector.register(pidfd, selectors.EVENT_READ)
                for fd in fds:
                    os.close(fd)


class _Hosts:
    """The host processes of this server; what one of them leaves, since it was killed, is ended and removed."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}

    def add(self, pid: int) -> int | None:
        """Know of ``pid``; returns a file that can be read from when it has ended, where the system has such."""
        try:
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return None
        self._pids[pidfd] = pid
        return pidfd

    def bury(self, pidfd: int) -> None:
        """The one of ``pidfd`` has ended."""
        del self._pids[pidfd]
        os.close(pidfd)
        end_descendants(self._pids.values())
        remove_leftovers()

    def leave(self) -> None:
        """The driver is gone, which host processes hear as well."""
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


def _attend(data: bytes, fds: list[int]) -> None:
    """Be the host process of one run; the first file is its link, the second its payload, the others for outcomes."""
    try:
        link = DriverClient(socket.socket(fileno=fds[0]))
        spec, gpus = pickle.loads(data)
        try:
            with host_workspace(spec, payload_fd=fds[1]) as place:
                reports = hold_ranks(spec, 0, place, link, None, fds[2:], "127.0.0.1", gpus)
            link.send({"type": "done", "reports": reports})
        except (LagomError, OSError) as error:
            link.send({"type": "lost", "message": f"{type(error).__name__}: {error}"})
        except Stopped:
            pass
    except LinkClosed:
        pass  # the driver is gone


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to answer
    sys.path.pop(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that have ended go at once
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # there is nothing to put away, and with torch imported that would take a second
