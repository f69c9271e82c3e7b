"""``RequestExchange``: exchanges of messages in which a rank may first request another exchange from all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lagom.exchange.background import RANKS, named
from lagom.exchange.native import TYPES, native
from lagom.watch.spans import COLLECTIVE
from lagom.watch.step_clock import EXCHANGE, StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lagom.exchange.native import Communicator
    from lagom.exchange.transport import Merging
    from lagom.watch.spans import Spans

_ASK = b"lagom asks for:\0"
"""Prefix of a message that is a request and no part of an exchange."""


class RequestExchange(ABC):
    """Exchanges in which a rank also serves the requests of other ranks. See Note [Asking]."""

    def __init__(self) -> None:
        self.serve: Callable[[bytes], None] | None = None
        """Callback that is given another rank's request, and takes part in the requested exchange.

        None while ranks make no requests.
        """
        self.handlers: dict[bytes, Callable[[bytes], None]] = {}
        """Callbacks for requests whose first word is the key, in place of ``serve``."""
        self.spans: Spans | None = None
        """Timeline that records the exchanges; None without one."""
        self.clock = StepClock()
        """Clock of the rank's training steps; this one stands still."""

    @abstractmethod
    def _exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return the messages of all ranks, requests included."""

    @abstractmethod
    def _merge(self, head: bytes, body: memoryview, merging: Merging) -> list[memoryview] | memoryview:
        """Return all bodies merged into one; a list of all messages if heads differ or some rank sends a request."""

    @abstractmethod
    def _with_room(self, size: int) -> Communicator | None:
        """Return the communicator of all ranks; None without one, or if messages have no room for ``size`` bytes."""

    def exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return the messages of all ranks, ``head`` and ``body`` in one, in rank order; lengths may differ.

        This is fast for small messages. Views are valid until the next call; this rank's own entry is ``head`` alone.
        """
        rows = self._exchange(head, body)
        while self._served(rows):
            rows = self._exchange(head, body)
        return rows

    def merge(self, head: bytes, body: memoryview, merging: Merging) -> memoryview | None:
        """Return the bodies of all ranks merged into one, equal on all ranks; None if not all give the same ``head``.

        All bodies have the same size. The view is valid until the next call.
        """
        while isinstance(found := self._merge(head, body, merging), list):
            if not self._served(found):
                return None
        return found

    def averaging(
        self, size: int, sections: Sequence[tuple[int, int, torch.dtype]]
    ) -> Callable[[bytes, Sequence[int], Sequence[int]], bool] | None:
        """Return a function that averages ``sections`` in one call of compiled code; None if that is not possible.

        The returned function takes a signature, the addresses of the sections' elements and the addresses for the
        sections' averages. Both addresses of a section may be the same, except for types of 2 bytes, whose averages are
        float32. The function averages if all ranks call it with the same signature, and returns whether they did. Other
        ranks may answer a call by ``exchange`` of the signature and the bytes, and may make a request first.

        Args:
            size: number of bytes of all sections together, with gaps.
            sections: for each section its first byte, its number of elements, and their floating type.
        """
        near = self._with_room(size)
        if near is None:
            return None
        prepared = native().Sections([(start, count, TYPES[dtype]) for start, count, dtype in sections], size)
        call, clock = near.average, self.clock
        if self.spans is not None:
            call = self.spans.timed(COLLECTIVE, "average", call, size, RANKS)

        def average(signed: bytes, given: Sequence[int], averages: Sequence[int]) -> bool:
            while True:
                part = clock.switch(EXCHANGE)
                try:
                    if call(signed, given, averages, prepared):
                        return True
                except (RuntimeError, OSError) as error:
                    raise named("exchange", error) from error
                finally:
                    clock.switch(part)
                if not self._served(near.rows()):
                    return False

        return average

    def ask(self, what: bytes) -> bool:
        """Send the request ``what``, which each other rank serves in its next exchange. See Note [Asking].

        When this returns, the other ranks take part in the requested exchange, and this rank must take part too. Return
        whether all ranks made this same request.
        """
        while True:
            rows = self._exchange(_ASK + what)
            asked = _asked(rows)
            if asked == what:
                return all(row == _ASK + what for row in rows)
            assert asked is not None
            self._handle(asked)

    def _served(self, rows: Sequence[memoryview]) -> bool:
        """Serve the request, if a rank has sent one in place of its message; return whether a rank has."""
        asked = _asked(rows) if self.serve is not None or self.handlers else None
        if asked is None:
            return False
        self._handle(asked)
        return True

    def _handle(self, asked: bytes) -> None:
        handle = self.handlers.get(asked.partition(b" ")[0], self.serve)
        assert handle is not None
        handle(asked)


def _asked(rows: Sequence[memoryview]) -> bytes | None:
    """Return the request of the lowest rank that made one; None without requests."""
    for row in rows:
        if row[: len(_ASK)] == _ASK:
            return bytes(row[len(_ASK) :])
    return None


# Note [Asking]
#
# A rank may need data of other ranks (such as a sharded optimizer state) at a place in the program that they do not
# reach, such as a checkpoint in a branch of rank 0. The rank sends a request to all ranks. Each other rank reads the
# request in the exchange in which it waits or which it begins next, at the latest in the exchange at the program's end.
# It takes part in the requested exchange, and then begins its own exchange again. Whatever lagom exchanges for a
# program begins with messages, such as signatures. So requests need no thread, and no rank waits for a message that
# cannot come. If several ranks make requests, the lowest rank's is served first.
