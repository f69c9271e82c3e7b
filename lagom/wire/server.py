"""``DriverServer``: the driver's end of the channel: an event loop in a thread serves the connections of all tasks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

from lagom.restart.kept_snapshots import FETCHED, SnapshotFolder
from lagom.wire.connection import DriverConnection
from lagom.wire.framing import anonymous_file, body_of
from lagom.wire.listener import DriverListener, files_for, listening_socket
from lagom.wire.messages import DeliverHello, FetchHello, Lost, Message, Received, TaskHello, own_version
from lagom.wire.peer_silence import probe_silence

_BUFFER = 1 << 18  # bytes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
_LOOK_S = 1.0
_LAST_TURNS, _TURN_S = 100, 0.01  # limit for sending the last messages, before the channel closes


class DriverServer:
    """Accepts connections of the tasks of one run, and carries messages between them and the driver.

    The callbacks ``on_message(task, message)``, ``on_close(task)`` and, each second after ``listen``,
    ``on_silence(task, seconds)`` are called in the channel's own thread. If the machine of a task is silent for
    ``lost_after_s`` seconds, its connection is closed.
    """

    def __init__(
        self,
        on_message: Callable[[int, Message], None],
        on_close: Callable[[int], None],
        payload_fd: int | None = None,
        on_silence: Callable[[int, float], None] = lambda task, seconds: None,
        lost_after_s: float = 20.0,
        hello_s: float = 5.0,
        *,
        snapshot_fd: int | None = None,
        snapshots: SnapshotFolder | None = None,
    ) -> None:
        """Prepare to serve the tasks of one run.

        Args:
            payload_fd: file with the payload for hosts that fetch it; None if hosts get the payload in another way.
            hello_s: seconds in which a connection must prove the secret.
            snapshot_fd: file with a snapshot for hosts that fetch it; None without a snapshot.
            snapshots: folder for the snapshots that ranks send; None if none are kept.
        """
        self.secret = secrets.token_bytes(32)
        self.delivered: dict[str, int] = {}
        """Descriptor of each received file that is not kept as a snapshot, by the name under which it came."""
        self.digests: dict[str, str] = {}
        """SHA-256 of each received snapshot and description of a snapshot, by the name under which it came."""
        self.addresses: dict[int, str] = {}
        """Address of each task, as this machine sees it; "" for an inherited connection."""
        self._on_message = on_message
        self._on_close = on_close
        self._on_silence = on_silence
        self._lost_after_s = lost_after_s
        self._hello_s = hello_s
        self._payload_fd, self._snapshot_fd, self._snapshots = payload_fd, snapshot_fd, snapshots
        self._peers: dict[int, DriverConnection] = {}
        self._open: set[DriverConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._buffer = bytearray(_BUFFER)
        self._stack = contextlib.ExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lagom-channel", daemon=True)

    def __enter__(self) -> DriverServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._stack.close()
        for fd in self.delivered.values():
            os.close(fd)

    def listen(self, host: str, num_tasks: int = 1, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Listen on ``host`` for ``num_tasks`` tasks, with encryption unless ``tls`` is None; return the address."""
        self._stack.enter_context(files_for(num_tasks))
        listener = listening_socket(host)
        name = listener.getsockname()
        accepting = DriverListener(self.secret, self._admit, self._buffer, self._hello_s)
        self._wait(self._start(accepting.accept(listener, tls)))
        self._wait(self._start(self._check_silence()))
        return str(name[0]), int(name[1])

    def adopt(self, connection: socket.socket, task: int) -> None:
        """Serve ``task`` over ``connection``, one of an inherited pair of sockets, which needs no proof."""

        async def start() -> None:
            peer = DriverConnection(None, self._buffer)
            await self._loop.connect_accepted_socket(lambda: peer, connection)
            self._serve(task, peer)

        self._wait(start())

    def send(self, task: int, message: Message) -> None:
        """Send ``message`` to the task, if it is connected."""
        self._send([task], message)

    def broadcast(self, message: Message) -> None:
        """Send ``message`` to every connected task."""
        self._send(None, message)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call ``function`` in the channel's thread after ``delay_s``, unless the channel is closed first."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, function)

    def _send(self, tasks: list[int] | None, message: Message) -> None:
        body = body_of(message)

        def send() -> None:
            for task in list(self._peers) if tasks is None else tasks:
                if (peer := self._peers.get(task)) is not None:
                    peer.send(body)

        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(send)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_silence(self) -> None:
        """Report each second how long the machine of each task has been silent, and close lost connections."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for task, peer in list(self._peers.items()):
                if not peer.gone:
                    seconds = peer.silence.seconds()
                    self._on_silence(task, seconds)
                    if seconds >= self._lost_after_s:
                        peer.close()

    async def _close(self) -> None:
        for _ in range(_LAST_TURNS):
            if not any(peer.behind for peer in self._peers.values()):
                break
            await asyncio.sleep(_TURN_S)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for peer in list(self._open):
            peer.close()
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)  # the event loop closes the connections in its next iterations
            if not self._open:
                break

    def _admit(self, peer: DriverConnection, hello: Message) -> None:
        """Serve an authenticated client according to the purpose in its first message."""
        match hello:
            case TaskHello():
                self._serve(hello.task, peer)
                if hello.version != own_version():
                    self._on_message(hello.task, Lost(message=_other_version(hello)))
            case FetchHello():
                self._keep(peer)
                fd = self._snapshot_fd if hello.name == FETCHED else self._payload_fd
                task = self._loop.create_task(self.hand_out(peer, fd))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case DeliverHello():
                self.take_in(hello.name, hello.size, peer)
            case _:
                peer.close()

    def _keep(self, peer: DriverConnection, over: Callable[[], None] = lambda: None) -> None:
        """Keep ``peer`` among the open connections until it has ended, and then call ``over``."""

        def ended() -> None:
            self._open.discard(peer)
            over()

        self._open.add(peer)
        peer.over = ended
        if peer.lost:
            ended()

    def _serve(self, task: int, peer: DriverConnection) -> None:
        def over() -> None:
            if self._peers.get(task) is peer:
                del self._peers[task]
            self._on_close(task)

        self._peers[task] = peer
        if not peer.gone:
            probe_silence(peer.connection, self._lost_after_s)
            with contextlib.suppress(OSError):  # the connection has just ended
                name = peer.connection.getpeername()
                self.addresses[task] = str(name[0]) if isinstance(name, tuple) else ""
        peer.serve(lambda message: self._on_message(task, message))
        self._keep(peer, over)

    async def hand_out(self, peer: DriverConnection, fd: int | None) -> None:
        """Send the bytes of ``fd`` to ``peer``; none if ``fd`` is None."""
        position = 0
        # Several hosts fetch at once and share the descriptor, so read by position.
        while fd is not None and not peer.gone:
            chunk = os.pread(fd, 1 << 20, position)
            if not chunk:
                break
            await peer.write(chunk)
            position += len(chunk)
        peer.end_writing()  # the other end closes the connection when it has all bytes

    def take_in(self, name: str, size: int, peer: DriverConnection) -> None:
        """Receive ``size`` bytes from ``peer`` as the file ``name``, and confirm when all have arrived."""
        path, digest, left = self._place_of(name), hashlib.sha256(), size
        fd = anonymous_file(name) if path is None else os.open(path, _NEW, 0o600)

        def write(data: bytes) -> None:
            nonlocal left
            left -= len(data := data[: max(0, left)])
            if path is not None:
                digest.update(data)
            while data:
                data = data[os.write(fd, data) :]
            if left == 0:
                left = -1
                if path is not None:
                    self.digests[name] = digest.hexdigest()
                else:
                    if (earlier := self.delivered.pop(name, None)) is not None:
                        os.close(earlier)
                    self.delivered[name] = os.dup(fd)
                peer.send(body_of(Received()))

        def over() -> None:
            os.close(fd)
            if path is not None and left > 0:  # the rank was killed, or the disk is full
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

        peer.receive(write)
        self._keep(peer, over)

    def _place_of(self, name: str) -> str | None:
        """Return the path for a snapshot, or a snapshot's description, that comes as ``name``; None for other names."""
        if self._snapshots is None or (found := re.fullmatch(rf"{FETCHED}-(\d+)(\.json)?", name)) is None:
            return None
        number = int(found[1])
        self._snapshots.remove_partials(but=number)  # of earlier snapshots that did not arrive completely
        return self._snapshots.partial_facts(number) if found[2] else self._snapshots.partial(number)


def _other_version(hello: TaskHello) -> str:
    return (
        f"task {hello.task} runs lagom {hello.version}, and the driver {own_version()}; give driver and executors the "
        "same version of lagom"
    )
