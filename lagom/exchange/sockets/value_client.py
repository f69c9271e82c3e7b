"""``ValueClient``: asks another rank for the values that its ``ValueServer`` keeps."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from lagom.exchange.sockets.connect import reach
from lagom.exchange.sockets.handshake import End
from lagom.exchange.sockets.value_server import ANSWER, HELD_S, REFUSAL, REQUEST, VALUE, Ask, store_purpose

if TYPE_CHECKING:
    from lagom.exchange.sockets.encryption import Credentials

_MOST = 1 << 32


class ValueClient:
    """Asks the ``ValueServer`` of rank 0. Threads may ask at the same time.

    Args:
        address: address at which the server listens.
        rank: number of this rank.
        timeout_s: how long to wait for the server. For an answer it is ``HELD_S`` more.

    Raises:
        OSError: when the server cannot be reached.
    """

    def __init__(self, address: tuple[str, int], rank: int, credentials: Credentials, timeout_s: float) -> None:
        end = End(rank, store_purpose(address))
        self._connection = reach(address, end, 0, credentials, timeout_s, waits=True)
        self._connection.settimeout(timeout_s + HELD_S)
        self._failure = ""
        self._sends = threading.Lock()
        self._number = 0
        self._arrived = threading.Condition()
        self._answers: dict[int, tuple[int, bytes]] = {}
        self._is_read = False
        """Whether a thread is reading the next answer, which may be for another thread."""
        _all.add(self)

    def ask(self, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        """Return the answer; None if there is no value of this name.

        Raises:
            OSError: when the rank that keeps the values is gone or does not answer in time. Also when a signal handler
                has interrupted an earlier call while it sent or read.
            ValueError: as ``ValueServer.ask``.
        """
        head = name.encode()
        with self._sends:
            self._check()
            self._number = number = (self._number + 1) % _MOST
            try:
                self._connection.sendall(REQUEST.pack(number, what, len(head), len(data)) + head + data)
            except BaseException as error:  # a part of the request may have been sent
                self._fail(error)
                raise
        kind, answer = self._answer(number)
        if kind == REFUSAL:
            raise ValueError(answer.decode())
        return answer if kind == VALUE else None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _answer(self, number: int) -> tuple[int, bytes]:
        """Return kind and content of an answer. One of the waiting threads reads answers for all of them."""
        with self._arrived:
            while number not in self._answers:
                self._check()
                if self._is_read:
                    self._arrived.wait()
                    continue
                self._is_read = True
                try:
                    self._arrived.release()
                    try:
                        answer = self._read()
                    finally:
                        self._arrived.acquire()
                finally:
                    self._is_read = False
                    self._arrived.notify_all()
                self._answers[answer[0]] = answer[1:]
            return self._answers.pop(number)

    def _read(self) -> tuple[int, int, bytes]:
        """Return number, kind and content of the next answer."""
        try:
            number, kind, size = ANSWER.unpack(self._exactly(ANSWER.size))
            return number, kind, self._exactly(size)
        except BaseException as error:  # a part of the answer may have been read
            self._fail(error)
            if isinstance(error, BlockingIOError):
                raise TimeoutError("it did not answer in time") from error
            raise

    def _fail(self, error: BaseException) -> None:
        self._failure = f"an earlier question to it has failed: {str(error) or type(error).__name__}"
        self._connection.close()

    def _check(self) -> None:
        if self._failure:
            raise ConnectionError(self._failure)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("the rank that keeps the run's store hung up")
            view = view[count:]
        return bytes(data)


_all: weakref.WeakSet[ValueClient] = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_all):
        one.close()


# Close the copies of the connection in a fork: with them, a loader worker that outlives its rank would keep the other
# ranks waiting for that rank.
os.register_at_fork(after_in_child=_close_all)
