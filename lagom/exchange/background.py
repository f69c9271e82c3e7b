"""``BackgroundExchanges``: a thread that runs exchanges in order while the program computes."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Work(Protocol):
    """Handle of an exchange that has begun: waits for its end."""

    def wait(self) -> object:
        """Wait until the exchange is done; raise its error."""

    def is_completed(self) -> bool:
        """Return whether the exchange is done."""


class Done:
    """Handle of an exchange that is done already: never waits."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


DONE = Done()


class BackgroundExchanges:
    """Runs calls in one thread, one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[BackgroundTask | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=_run, args=(self._queue, self._ended), name=name, daemon=True)
        self._thread.start()

    def later(self, call: Callable[[], None]) -> Work:
        """Queue ``call`` behind all earlier calls; return its handle, whose ``wait`` fails if ``close`` came before."""
        task = BackgroundTask(call)
        self._queue.put(task)
        if self._ended.is_set():
            _refuse_all(self._queue)
        return task

    def close(self) -> None:
        """Accept no more calls; the thread still runs the calls that are queued."""
        self._queue.put(None)

    def refuse(self) -> None:
        """Fail all calls from now on, in a forked process, which has no thread to run them."""
        self._queue = queue.SimpleQueue()
        self._ended = threading.Event()
        self._ended.set()

    def join(self, timeout_s: float) -> None:
        """Wait after ``close`` until the thread has run all calls; return at once in the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class BackgroundTask:
    """Handle of a call of ``BackgroundExchanges``."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # free the tensors that the call holds
        self._done.set()

    def refuse(self) -> None:
        self._error = ConnectionError("the connections between ranks are closed")
        self._call = None
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def _run(tasks: queue.SimpleQueue[BackgroundTask | None], ended: threading.Event) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task
    ended.set()
    _refuse_all(tasks)


def _refuse_all(tasks: queue.SimpleQueue[BackgroundTask | None]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            task = tasks.get_nowait()
            if task is not None:
                task.refuse()
