"""``forked_server``: launches on this machine fork from a copy of the test's process, with all that it has imported."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import patch

from lagom.host import fork_server
from lagom.wire.framing import send_with_files

_PATIENCE_S = 20.0
_LAUNCHERS = ["lagom.driver.local"]
"""Modules that start ranks by the launcher's server."""
with suppress(ModuleNotFoundError):  # the extension may be missing
    # Before ``forked_server`` replaces what it takes from the launcher.
    import lagom.extensions.search.slots.local_slots

    _LAUNCHERS.append(lagom.extensions.search.slots.local_slots.__name__)


@contextmanager
def forked_server() -> Iterator[None]:
    """Have launches on this machine use a fork server that is forked from this process, for a while.

    Its ranks and trials find the libraries that the test has imported, each of which would take seconds in each of
    them. For tests of something else than the launcher.
    """
    server = _ForkedServer()
    try:
        with ExitStack() as stack:
            for launcher in _LAUNCHERS:
                stack.enter_context(patch(f"{launcher}.server", lambda: server))
            yield
    finally:
        server.close()


class _ForkedServer:
    """Stands in for the launcher's server."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork() or self._serve(theirs)
        self.process = SimpleNamespace(pid=self._pid)

    def send(self, request: bytes, fds: list[int]) -> None:
        """Send ``request`` with the files of its run."""
        send_with_files(self._socket, request, fds)

    def ended(self) -> bool:
        """Return False: nobody kills this server."""
        return False

    def close(self) -> None:
        """End the server, and all its runs; kill it if it hangs, as a fork of a process with threads may."""
        self._socket.close()
        deadline = time.monotonic() + _PATIENCE_S
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.005)

    def _serve(self, connection: socket.socket) -> int:
        try:
            self._socket.close()
            os.setsid()
            os.chdir("/")
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1):
                os.dup2(nothing, fd)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended children
            fork_server.serve(connection)
        finally:
            os._exit(0)
