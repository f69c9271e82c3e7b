"""``Prefetcher``: an iterator whose own thread draws a few items ahead."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

_ENDING_S = 10.0
"""Longest wait for a reading thread when the process ends. See Note [The end of the process]."""
_CLOSED = "the data set was closed while it was read"
_running: dict[threading.Thread, tuple[_Line[Any], int]] = {}
"""For each running thread, the queue that it fills, and the id of its process."""


class Prefetcher(Generic[T]):
    """Draws from ``items`` in a thread, at most ``depth`` items ahead; ``next`` raises the thread's errors."""

    def __init__(self, items: Iterator[T], depth: int = 1) -> None:
        self._line: _Line[T] = _Line(depth)
        # The thread has a reference to the queue only, so that dropping this object ends the thread.
        self._thread = threading.Thread(target=_draw, args=(items, self._line), name="lagom-reader", daemon=True)
        _running[self._thread] = self._line, os.getpid()
        self._thread.start()
        # The finalizer holds the thread, not the queue: the queue may hold an error, whose traceback holds open files.
        weakref.finalize(self, _end_thread, self._thread, os.getpid())

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        return self._line.take()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._line.close()
        self._thread.join()


class _Line(Generic[T]):
    """The queue of items that the thread has drawn and nobody has taken."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._end: BaseException | None = None
        self._closed = False

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._end is not None)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            assert self._end is not None
            raise self._end

    def has_room(self) -> bool:
        """Wait until the queue has room; return False if it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            return not self._closed

    def put(self, item: T) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
            self._changed.notify_all()

    def finish(self, end: BaseException) -> None:
        with self._changed:
            if not self._closed:
                self._end = end
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._end = ValueError(_CLOSED)  # drops the thread's error, whose traceback holds open files
            self._changed.notify_all()


def _draw(items: Iterator[T], line: _Line[T]) -> None:
    try:
        # Waits for room before drawing; otherwise one more item would be in memory.
        while line.has_room():
            line.put(next(items))
    except BaseException as error:
        line.finish(error)
    finally:
        if isinstance(items, Generator):
            items.close()  # a traceback may keep the generator alive for long
        _running.pop(threading.current_thread(), None)


def _end_thread(thread: threading.Thread, pid: int) -> None:
    line, _ = _running.get(thread, (None, pid))
    if line is not None:
        _end(line, pid)


def _end(line: _Line[T], pid: int) -> None:
    # A forked process does not have the thread, and the thread may have held the queue's lock at the fork.
    if os.getpid() == pid:
        line.close()


def _end_all() -> None:
    for thread, (line, pid) in list(_running.items()):
        _end(line, pid)
        if pid == os.getpid():
            thread.join(_ENDING_S)


atexit.register(_end_all)


# Note [The end of the process]
#
# A program may leave a loop over a loader and end. A reading thread would then return from Arrow to an interpreter that
# no longer exists. This would end the thread inside C++ and abort the process: "terminate called without an active
# exception". So the end of the process waits for reading threads.
