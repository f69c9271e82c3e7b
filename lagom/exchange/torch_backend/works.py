"""``WorkThread``: runs exchanges in a thread, each with a ``dist.Work`` as its handle."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NO_TIMEOUT = timedelta(0)


class SharedWork(dist.Work):
    """Handle of an exchange that has run, or that a ``WorkThread`` will run.

    Args:
        run: runs the exchange; None if it has run.
        result: tensors that the exchange fills.
        source: the rank that sent the message; -1 for collectives.
    """

    def __init__(self, run: Callable[[], object] | None, result: Sequence[Tensor], source: int = -1) -> None:
        super().__init__()
        self.source = source
        self._run = run
        self._result = list(result)
        self._error: Exception | None = None
        self._done: threading.Event | None = None if run is None else threading.Event()
        # Made only when needed: programs seldom ask for the future of a finished exchange.
        self._base: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        if run is not None:
            self._make_future()

    def perform(self) -> None:
        """Run the exchange; ``wait`` raises its error."""
        assert self._run is not None
        try:
            with torch.no_grad():
                self._run()
        except Exception as error:
            self._error = error
        self._run = None
        assert self._done is not None
        assert self._base is not None
        self._done.set()
        self._base.set_result(None)

    def _make_future(self) -> None:
        # A callback raises the error: C++ code such as DDP would take the exception of ``set_exception`` for a result.
        self._base = torch.futures.Future()
        self._future = self._base.then(self._outcome)

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the exchange is done.

        Raises:
            RuntimeError: when the exchange is not done within ``timeout``. Zero means the group's timeout.
            Exception: the error of the exchange, when it failed.
        """
        if self._done is not None and not self._done.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"the exchange was not done within {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Wait until the exchange is done, without raising its error."""
        if self._done is not None:
            self._done.wait()

    def synchronize(self) -> None:
        """Wait until the exchange is done; CPU tensors need no wait for a device."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the exchange is done, or failed."""
        return self._done is None or self._done.is_set()

    def is_success(self) -> bool:
        """Return whether the exchange is done and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Return the error of the exchange."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that the exchange filled."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with ``result``."""
        if self._future is None:
            self._make_future()
            assert self._base is not None
            self._base.set_result(None)
        assert self._future is not None
        return self._future

    def source_rank(self) -> int:
        """Return the rank that sent the message."""
        return self.source

    _source_rank = source_rank
    getFuture = get_future


def finished(result: Sequence[Tensor]) -> SharedWork:
    """Return the work of an exchange that is done already."""
    return SharedWork(None, result)


class WorkThread:
    """A thread that runs one exchange after the other; it starts with the first exchange."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[SharedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: SharedWork | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all given exchanges are done."""
        return self._last is None or self._last.is_completed()

    def later(self, run: Callable[[], object], result: Sequence[Tensor], source: int = -1) -> SharedWork:
        """Queue ``run`` behind all earlier exchanges, and return its work."""
        work = self.prepare(run, result, source)
        self.start(work)
        return work

    def prepare(self, run: Callable[[], object], result: Sequence[Tensor], source: int = -1) -> SharedWork:
        """Return a work that runs ``run``; pass it to ``start``."""
        return SharedWork(run, result, source)

    def start(self, work: SharedWork) -> None:
        """Queue ``work`` behind all earlier exchanges."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        self._last = work
        self._queue.put(work)

    def close(self) -> None:
        """Accept no more exchanges; the thread still runs those that are queued."""
        if self._thread is not None:
            self._queue.put(None)

    def wait(self) -> None:
        """Wait until all queued exchanges are done or have failed; return at once in the thread itself."""
        if self._last is not None and threading.current_thread() is not self._thread:
            self._last.finish()


def _work_off(given: queue.SimpleQueue[SharedWork | None]) -> None:
    while (work := given.get()) is not None:
        work.perform()
        del work
