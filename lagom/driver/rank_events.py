"""``RankEvents``: a bounded queue of the ranks' messages, from the channel's thread to the thread that shows them."""

from __future__ import annotations

import queue
import threading

from lagom.wire.messages import Dropped, LocalEvent, Log, Message, ProgressReport

_MAX_BYTES = 64 << 20
"""Bytes of output and progress that may wait for a slow terminal or disk."""
_PROGRESS = 1000  # approximate bytes of one report of progress


class RankEvents:
    """Queues the events of ranks for the driver, first in, first out.

    While ``limit`` bytes wait, new output is dropped and counted, new progress is dropped, and other events are kept.
    """

    def __init__(self, limit: int = _MAX_BYTES) -> None:
        self._limit = limit
        self._events: queue.SimpleQueue[Message | LocalEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._dropped = 0

    def put(self, event: Message | LocalEvent) -> None:
        """Add ``event``, from any thread, without waiting."""
        size = self._size(event)
        if not size:
            self._events.put(event)
            return
        with self._lock:
            if self._waiting + size > self._limit:
                self._dropped += isinstance(event, Log)
                return
            self._waiting += size
            told = self._take_dropped()
        if told is not None:
            self._events.put(told)
        self._events.put(event)

    def get(self, timeout: float | None = None) -> Message | LocalEvent:
        """Return the next event, or ``Dropped`` if pieces of output were dropped.

        Args:
            timeout: seconds to wait; None does not wait.

        Raises:
            queue.Empty: if there is none.
        """
        try:
            event = self._events.get_nowait() if timeout is None else self._events.get(timeout=timeout)
        except queue.Empty:
            with self._lock:
                told = self._take_dropped()
            if told is None:
                raise
            return told
        if size := self._size(event):
            with self._lock:
                self._waiting -= size
        return event

    def _take_dropped(self) -> Dropped | None:
        dropped, self._dropped = self._dropped, 0
        return Dropped(messages=dropped) if dropped else None

    def _size(self, event: Message | LocalEvent) -> int:
        """Return the bytes that count against the limit; 0 for events that are never dropped."""
        if isinstance(event, Log):
            return len(event.data) + 1
        return _PROGRESS if isinstance(event, ProgressReport) else 0
