"""``run_in_server``: runs a task in a process that the fork server of this executor forks.

See Note [One server for an executor] in executor_server.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import platform
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lagom.errors import LagomError, PlanError
from lagom.host.huge_pages import with_huge_pages
from lagom.host.workspace import base_dir, locked_servers
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import (
    Gathered,
    GatherRequest,
    Message,
    PayloadRequest,
    PayloadWritten,
    TaskBegan,
    TaskEnded,
    TaskRefused,
    TorchMissing,
)

_MAX_PATH = 100  # most characters of a Unix socket's path


_TRIES = 3
"""Attempts to start a task: a server may end before it starts one, as the import of torch takes much memory at once."""


class _NotBegunError(LinkClosed):
    """The server has ended before the task began."""


class Task(Protocol):
    """A task that a host process runs; it is sent to the process as a pickle."""

    def run(
        self,
        files: Sequence[int],
        gather: Callable[[str], Sequence[str]],
        take_payload: Callable[[str], None],
    ) -> None:
        """Run the task with the descriptors ``files``; see ``run_in_server`` for the functions."""


def run_in_server(
    task: Task,
    files: Sequence[int],
    gather: Callable[[str], Sequence[str]] | None,
    take_payload: Callable[[str], None] | None = None,
) -> str:
    """Run ``task`` in a host process that the server forks; return as a text how this process ended.

    Args:
        task: the task for the host process.
        files: descriptors of open files that are passed to the host process.
        gather: sends the text of this task to all tasks of the stage, and returns their texts; None outside of barrier
            jobs.
        take_payload: writes the payload that Spark has broadcast to the file with the given path; None if Spark has
            broadcast none.

    Raises:
        PlanError: if torch cannot be imported on this executor.
        LagomError: if the system can start no process, or the server ends again and again.
    """
    request = anonymous_file("request")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, request)
        worker = {"env": dict(os.environ), "cwd": os.getcwd(), "sys_path": list(sys.path)}
        with os.fdopen(os.dup(request), "wb") as file:
            pickle.dump((worker, task), file)
        for _ in range(_TRIES):
            ours, theirs = socket.socketpair()
            asks = stack.enter_context(contextlib.closing(DriverClient(ours)))
            with theirs:
                link = _sent([request, theirs.fileno(), *files])
            try:
                reply = _reply(link, asks, gather, take_payload)
                break
            except _NotBegunError:
                disconnect()
            except LinkClosed:
                return "ended with the process that holds torch for its executor, which was killed or crashed"
        else:
            raise LagomError(_ends_again())
    if isinstance(reply, TorchMissing):
        raise PlanError(without_torch(reply.problem))
    if isinstance(reply, TaskRefused):
        raise LagomError(f"no process for the ranks can be started on {platform.node()}: {reply.why}")
    assert isinstance(reply, TaskEnded)
    status = reply.status
    return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "ended"


def without_torch(problem: str) -> str:
    """Return the error text for an executor whose Python cannot import torch."""
    return (
        f"the executor on {platform.node()} has no torch ({problem}); its Python is {sys.executable}: "
        "install torch there, or set PYSPARK_PYTHON to a Python that has it"
    )


def _reply(
    link: DriverClient,
    asks: DriverClient,
    gather: Callable[[str], Sequence[str]] | None,
    take_payload: Callable[[str], None] | None,
) -> Message:
    """Return the server's last reply; until it comes, answer the requests of the host process.

    Raises:
        _NotBegunError: if the server ended before it had started the host process.
        LinkClosed: if the server ended later.
    """

    def answer() -> None:
        try:
            for message in asks.poll():
                if isinstance(message, PayloadRequest):
                    assert take_payload is not None
                    take_payload(message.path)
                    asks.send(PayloadWritten())
                elif isinstance(message, GatherRequest):
                    assert gather is not None
                    asks.send(Gathered(texts=list(gather(message.text))))
        except LinkClosed:
            selector.unregister(asks)

    messages = list[Message]()
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ, lambda: messages.extend(link.poll()))
        selector.register(asks, selectors.EVENT_READ, answer)
        try:
            while not messages or isinstance(messages[-1], TaskBegan):
                for key, _ in selector.select():
                    key.data()
        except LinkClosed as error:
            if not messages:
                raise _NotBegunError(str(error)) from error
            raise
    return messages[-1]


def _sent(fds: Sequence[int]) -> DriverClient:
    """Send the descriptors ``fds`` to the server of this executor; return the connection to it."""
    global _link  # one connection per Python worker, which Spark reuses for the next task
    for _ in range(2):
        if _link is None:
            _link = DriverClient(_connection())
        try:
            socket.send_fds(_link.socket, [b"T"], fds)
            return _link
        except OSError:  # the server was killed
            disconnect()
    raise LagomError(_ends_again())


def _ends_again() -> str:
    return (
        f"the process that holds torch for the executor on {platform.node()} ends again and again; look into the "
        "executor's stderr for the reason, and run `import torch` with its Python"
    )


_link: DriverClient | None = None


def disconnect() -> None:
    """Close this worker's connection; its next task opens another."""
    global _link  # see _sent()
    if _link is not None:
        _link.close()
        _link = None


def _connection() -> socket.socket:
    """Connect to the server of this executor and this version of lagom; start it if there is none."""
    root = str(Path(__file__).parents[2])
    folder = base_dir() / f"server-{_executor(root)}"
    with locked_servers():
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _dial(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        _start(folder, root)
        return _dial(folder)


def _executor(root: str) -> str:
    """Return a name for the process of ``_owner``.

    The name is a hash of the pid, the host, the namespaces, Python and lagom's folder: on another host or in another
    namespace, a different process may have the same pid.
    """
    facts = [platform.node(), str(_owner()), sys.executable, root]
    for kind in ("pid", "mnt", "net"):
        with contextlib.suppress(OSError):
            facts.append(os.readlink(f"/proc/self/ns/{kind}"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _owner() -> int:
    """Return the process with which the server ends: the parent of the executor's workers.

    Spark's daemon leads the process group of its workers. If it was killed, its workers live on, as children of a
    process that does not end, and Spark gives them further tasks: then the server ends with this worker.
    """
    daemon, parent = os.getpgrp(), os.getppid()
    if parent == daemon or Path(f"/proc/{daemon}").exists():
        return parent
    with contextlib.suppress(OSError):
        if b"java" in Path(f"/proc/{parent}/cmdline").read_bytes():
            return parent  # spark.python.use.daemon is false
    return os.getpid()


def _start(folder: Path, root: str) -> None:
    alive = os.open(folder / ".alive", os.O_RDWR | os.O_CREAT, 0o600)
    listener = socket.socket(socket.AF_UNIX)
    try:
        fcntl.flock(alive, fcntl.LOCK_EX)  # until the server and its host processes have ended
        with _short_path(folder) as path:
            listener.bind(path)
        listener.listen(1024)
        command = [sys.executable, str(Path(__file__).with_name("start_server.py")), root]
        command += [str(listener.fileno()), str(_owner()), str(folder)]
        for fd in (listener.fileno(), alive):
            os.set_inheritable(fd, True)
        no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        # Not by ``subprocess``, which would warn that the server outlives this process.
        env = with_huge_pages({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        os.posix_spawn(sys.executable, command, env, file_actions=[no_input])
    finally:
        listener.close()
        os.close(alive)


def _dial(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(folder) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a path of the socket in ``folder`` that is short enough for the system; YARN's folders have long paths."""
    if len(str(folder / "socket")) <= _MAX_PATH:
        yield str(folder / "socket")
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)
