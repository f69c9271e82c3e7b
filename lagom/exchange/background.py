"""Exchanges in progress: their handles, the thread that runs them in order, and their names in errors."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lagom.errors import CollectiveError
from lagom.watch.spans import ASYNCHRONOUS, COLLECTIVE
from lagom.watch.step_clock import EXCHANGE, OUTSIDE

if TYPE_CHECKING:
    from lagom.watch.spans import Spans
    from lagom.watch.step_clock import StepClock


class Work(Protocol):
    """Handle of an exchange that has begun: waits for its end."""

    def wait(self) -> object:
        """Wait until the exchange is done; raise its error."""

    def is_completed(self) -> bool:
        """Return whether the exchange is done."""


class CompletedWork:
    """Handle of an exchange that is done already: never waits."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


DONE = CompletedWork()


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


RANKS, ASIDE = "ranks", "aside"
"""Streams of lagom's own exchanges in a timeline."""


EXCHANGE_EVENT = "lagom.exchange"
"""Audit event of an exchange between ranks."""


class NamedExchange:
    """Records an exchange in the timeline and the rank's clock, and makes a RuntimeError or OSError a CollectiveError.

    Args:
        spans: the timeline; None without one.
        size: bytes that this rank exchanges.
        stream: as in ``Span``.
        shown: name in the timeline; "" for ``name``.
        clock: the clock of the rank's steps; None if the exchange is not in the program's thread.
    """

    __slots__ = ("_clock", "_name", "_number", "_part", "_shown", "_size", "_spans", "_start", "_stream")

    def __init__(
        self,
        name: str,
        spans: Spans | None = None,
        size: int = 0,
        stream: str = RANKS,
        shown: str = "",
        clock: StepClock | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._part = OUTSIDE
        self._spans = spans
        self._size = size
        self._stream = stream
        self._shown = shown or name

    def __enter__(self) -> NamedExchange:
        sys.audit(EXCHANGE_EVENT)
        if self._spans is not None:
            self._number = self._spans.numbers(self._stream)()
            self._start = self._spans.clock()
        if self._clock is not None:
            self._part = self._clock.switch(EXCHANGE)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._clock is not None:
            self._clock.switch(self._part)
        if self._spans is not None:
            self._spans.add(COLLECTIVE, self._shown, self._start, self._size, self._stream, self._number)
        if isinstance(error, (RuntimeError, OSError)) and not isinstance(error, CollectiveError):
            raise named(self._name, error) from error

    def goes_on(self, work: Work) -> Work:
        """Return ``work``, begun in this block, wrapped so that the timeline shows it until its ``wait`` returns."""
        if self._spans is None or type(work) is CompletedWork:
            return work
        values = self._start, self._size, self._stream, self._number
        self._shown, self._stream, self._number = f"{self._name} begins", "", -1
        return _RecordedWork(work, partial(self._spans.add, ASYNCHRONOUS, self._name, *values))


class _RecordedWork:
    def __init__(self, work: Work, record: Callable[[], None]) -> None:
        self._work = work
        self._record = record

    def wait(self) -> None:
        try:
            self._work.wait()
        finally:
            self._record()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def named(operation: str, error: Exception) -> CollectiveError:
    """Return the error to raise when ``operation`` failed with ``error``."""
    if "Duplicate GPU" in str(error):  # NCCL's text
        return CollectiveError(
            f"{operation} failed, because two ranks use one device: name devices without a number, such as "
            f"torch.accelerator.current_accelerator(), since each rank has its own selected: {error}"
        )
    return CollectiveError(f"{operation} failed, as a rule because another rank is gone: {error}")
