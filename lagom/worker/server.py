"""The local launcher's fork server: torch imported once, a forked process for each run, gone with its driver."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from typing import NoReturn

from lagom.errors import LagomError
from lagom.monitor.link import Link, LinkClosed
from lagom.worker.child import die_with
from lagom.worker.ground import ground
from lagom.worker.host import hold
from lagom.worker.rendezvous import Stopped

MAX_FDS = 250  # of one message; the kernel allows 253


def serve(connection: socket.socket) -> None:
    """Answer requests until the driver is gone; each is a ``Spec`` and the files of its run."""
    import lagom.worker.warm  # noqa: F401  (what makes a fresh interpreter slow; forked processes have it)

    connection.sendall(b"r")
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1 << 22, MAX_FDS)
        except OSError:
            return
        if not data:
            return
        if os.fork() == 0:
            _attend(data, fds)
        for fd in fds:
            os.close(fd)


def _attend(data: bytes, fds: list[int]) -> NoReturn:
    """Be the host process of one run; the first file is its link, the second its payload, the others for outcomes."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    die_with(os.getppid())
    code = 1
    try:
        link = Link(socket.socket(fileno=fds[0]))
        spec, gpus = pickle.loads(data)
        try:
            with ground(spec, payload_fd=fds[1]) as place:
                reports = hold(spec, 0, place, link, None, fds[2:], "127.0.0.1", gpus)
            link.send({"type": "done", "reports": reports})
            code = 0
        except (LagomError, OSError) as error:
            link.send({"type": "lost", "message": f"{type(error).__name__}: {error}"})
        except Stopped:
            code = 0
    except LinkClosed:
        pass  # the driver is gone
    finally:
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to answer
    sys.path.pop(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that have ended go at once
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # there is nothing to put away, and with torch imported that would take a second
