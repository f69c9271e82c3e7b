"""``RankEvents``: what ranks say, on its way from the channel's thread to the one that shows it, in bounded memory."""

from __future__ import annotations

import queue
import threading

from lagom.wire.client import Message

_MAX_BYTES = 64 << 20
"""Of output and of reports of progress that may wait for a terminal or a disk that takes nothing."""
_PROGRESS = 1000  # bytes that one takes, about


class RankEvents:
    """First in, first out. Above the limit output is dropped and counted, and progress dropped; all else is kept."""

    def __init__(self, limit: int = _MAX_BYTES) -> None:
        self._limit = limit
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._dropped = 0

    def put(self, event: Message) -> None:
        """Add one, from any thread, without waiting."""
        size = _size(event)
        if not size:
            self._events.put(event)
            return
        with self._lock:
            if self._waiting + size > self._limit:
                self._dropped += event["type"] == "log"
                return
            self._waiting += size
            told = self._told()
        if told is not None:
            self._events.put(told)
        self._events.put(event)

    def get(self, timeout: float | None = None) -> Message:
        """The next one; how much was dropped before it is one as well.

        Args:
            timeout: seconds to wait for it; None: not at all.

        Raises:
            queue.Empty: when there is none.
        """
        try:
            event = self._events.get_nowait() if timeout is None else self._events.get(timeout=timeout)
        except queue.Empty:
            with self._lock:
                told = self._told()
            if told is None:
                raise
            return told
        if size := _size(event):
            with self._lock:
                self._waiting -= size
        return event

    def _told(self) -> Message | None:
        dropped, self._dropped = self._dropped, 0
        return {"type": "dropped", "messages": dropped} if dropped else None


def _size(event: Message) -> int:
    """Bytes that count; 0 for what is never dropped."""
    if event["type"] == "log":
        return len(event["data"]) + 1
    return _PROGRESS if event["type"] == "progress" else 0
