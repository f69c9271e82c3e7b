"""The driver's end: one event loop in a thread, serving the connections of all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from lagom.monitor.link import MAX_FRAME, Message, encode, proof

_MAX_HELLO = 4096  # bytes that a stranger may send before it has proved itself
_HELLO_S = 5.0
_STRANGE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, asyncio.TimeoutError)
"""What a peer that is not one of ours can cause; ``asyncio.IncompleteReadError`` is an ``EOFError``."""


class Channel:
    """Accepts the ranks of one run, hands their messages on and carries the driver's to them.

    ``on_message(task, message)`` and ``on_close(task)`` are called in the channel's own thread.
    """

    def __init__(
        self,
        on_message: Callable[[int, Message], None],
        on_close: Callable[[int], None],
        payload_fd: int | None = None,
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self.delivered: dict[str, int] = {}
        self._on_message = on_message
        self._on_close = on_close
        self._payload_fd = payload_fd
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lagom-channel", daemon=True)

    def __enter__(self) -> Channel:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for fd in self.delivered.values():
            os.close(fd)

    def listen(self, host: str) -> tuple[str, int]:
        """Accept connections on ``host``, at a port that the system chooses; returns the address."""

        async def start() -> tuple[str, int]:
            self._server = await asyncio.start_server(self._greet, host, 0, limit=MAX_FRAME)
            name = self._server.sockets[0].getsockname()
            return name[0], name[1]

        address: tuple[str, int] = self._wait(start())
        return address

    def adopt(self, connection: socket.socket, task: int) -> None:
        """Serve a connection whose other end is known to be ours: an inherited pair of sockets."""

        async def start() -> None:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_FRAME)
            pending = asyncio.ensure_future(self._serve(task, reader, writer))
            self._tasks.add(pending)
            pending.add_done_callback(self._tasks.discard)

        self._wait(start())

    def send(self, task: int, message: Message) -> None:
        """Send ``message`` to the task; to one that is gone, nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(self._write, task, encode(message))

    def broadcast(self, message: Message) -> None:
        """Send ``message`` to every task that is connected."""
        for task in list(self._writers):
            self.send(task, message)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call ``function`` in the channel's thread, unless the channel is closed before."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, function)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _write(self, task: int, frame: bytes) -> None:
        writer = self._writers.get(task)
        if writer is not None and not writer.is_closing():
            writer.write(frame)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)
            writer.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A stranger: it proves that it knows the secret, or it is sent away unread."""
        nonce = secrets.token_bytes(16)
        try:
            writer.write(encode({"nonce": nonce.hex()}))
            hello = await asyncio.wait_for(_read(reader, _MAX_HELLO), _HELLO_S)
            if not hmac.compare_digest(str(hello.get("proof", "")), proof(self.secret, nonce)):
                return
            if hello.get("purpose") == "fetch":
                await self._hand_out(writer)
            elif hello.get("purpose") == "deliver":
                await self._take_in(str(hello["name"]), int(hello["size"]), reader, writer)
            else:
                await self._serve(int(hello["task"]), reader, writer)
        except _STRANGE:
            pass  # not one of ours, or gone again
        except asyncio.CancelledError:
            pass  # the channel closes; raised further, asyncio would print it
        finally:
            writer.close()

    async def _serve(self, task: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[task] = writer
        try:
            while True:
                self._on_message(task, await _read(reader, MAX_FRAME))
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            if self._writers.get(task) is writer:
                del self._writers[task]
            writer.close()
            self._on_close(task)

    async def _hand_out(self, writer: asyncio.StreamWriter) -> None:
        if self._payload_fd is None:
            return
        with os.fdopen(os.dup(self._payload_fd), "rb") as file:
            # A duplicate shares its position with the original; several hosts fetch at once, so pread.
            position = 0
            while chunk := os.pread(file.fileno(), 1 << 20, position):
                writer.write(chunk)
                await writer.drain()
                position += len(chunk)

    async def _take_in(self, name: str, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fd = anonymous_file(name)
        while size and (chunk := await reader.read(min(size, 1 << 20))):
            size -= len(chunk)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
        if size:
            os.close(fd)
            return
        if (earlier := self.delivered.pop(name, None)) is not None:
            os.close(earlier)
        self.delivered[name] = fd
        writer.write(encode({"type": "received"}))
        await writer.drain()


async def _read(reader: asyncio.StreamReader, limit: int) -> Message:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    if length > limit:
        raise ValueError(f"a frame of {length} bytes; at most {limit} are allowed")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError("a frame holds one JSON object")
    return message


def anonymous_file(name: str) -> int:
    """A file without a path, gone when its last user is: memory where the system has it, else a temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"lagom-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
