"""``Operation``: gives an exchange between ranks its name in errors and in the timeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lagom.errors import CollectiveError
from lagom.exchange.background import Done
from lagom.watch.spans import ASYNCHRONOUS, COLLECTIVE

if TYPE_CHECKING:
    from lagom.exchange.background import Work
    from lagom.watch.spans import Spans

RANKS, ASIDE = "ranks", "aside"
"""Streams of lagom's own exchanges in a timeline."""
EXCHANGE = "lagom.exchange"
"""Audit event of an exchange between ranks."""


class Operation:
    """Records an exchange in the timeline, and turns a RuntimeError or an OSError into a CollectiveError.

    Args:
        spans: the timeline; None without one.
        size: bytes that this rank exchanges.
        stream: as in ``Span``.
        shown: name in the timeline; "" for ``name``.
    """

    __slots__ = ("_name", "_number", "_shown", "_size", "_spans", "_start", "_stream")

    def __init__(
        self, name: str, spans: Spans | None = None, size: int = 0, stream: str = RANKS, shown: str = ""
    ) -> None:
        self._name = name
        self._spans = spans
        self._size = size
        self._stream = stream
        self._shown = shown or name

    def __enter__(self) -> Operation:
        sys.audit(EXCHANGE)
        if self._spans is not None:
            self._number = self._spans.numbers(self._stream)()
            self._start = self._spans.clock()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._spans is not None:
            self._spans.add(COLLECTIVE, self._shown, self._start, self._size, self._stream, self._number)
        if isinstance(error, (RuntimeError, OSError)) and not isinstance(error, CollectiveError):
            raise named(self._name, error) from error

    def goes_on(self, work: Work) -> Work:
        """Return ``work``, begun in this block, wrapped so that the timeline shows it until its ``wait`` returns."""
        if self._spans is None or type(work) is Done:
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
    return CollectiveError(f"{operation} failed, as a rule because another rank is gone: {error}")
