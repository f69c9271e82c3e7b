"""``RequestExchange``: exchanges of messages, in which a rank may request something else from the others first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lagom.collectives.native import TYPES, native
from lagom.collectives.operation import RANKS, named
from lagom.monitor.spans import COLLECTIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lagom.collectives.native import Communicator
    from lagom.collectives.transport import Merging
    from lagom.monitor.spans import Spans

_ASK = b"lagom asks for:\0"
"""Prefix of a message that is a request and no part of an exchange."""


class RequestExchange(ABC):
    """Exchanges that serve the other ranks' requests. See Note [Asking]."""

    def __init__(self) -> None:
        self.serve: Callable[[bytes], None] | None = None
        """Takes part in what another rank has requested."""
        self.spans: Spans | None = None
        """Timeline that records the exchanges; None without one."""

    @abstractmethod
    def _exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return the messages of all ranks, requests included."""

    @abstractmethod
    def _merge(self, head: bytes, body: memoryview, merging: Merging) -> list[memoryview] | memoryview:
        """Return all bodies as one, or the beginnings of all messages, requests included."""

    @abstractmethod
    def _with_room(self, size: int) -> Communicator | None:
        """Return the communicator of all ranks if its messages have room for ``size`` bytes; None if there is none."""

    def exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """Return the messages of all ranks, ``head`` and ``body`` in one, in rank order; lengths may differ.

        Fast for small messages. Views are valid until the next call; this rank's own entry is ``head`` alone.
        """
        rows = self._exchange(head, body)
        while self._served(rows):
            rows = self._exchange(head, body)
        return rows

    def merge(self, head: bytes, body: memoryview, merging: Merging) -> memoryview | None:
        """Return the bodies of all ranks as one, the same on all ranks; None if not all give the same ``head``.

        Bodies have one size. The view is valid until the next call.
        """
        while isinstance(found := self._merge(head, body, merging), list):
            if not self._served(found):
                return None
        return found

    def averaging(
        self, size: int, sections: Sequence[tuple[int, int, torch.dtype]]
    ) -> Callable[[bytes, Sequence[int], Sequence[int]], bool] | None:
        """Prepare an average of elements in ``sections`` of ``size`` bytes; return None if no compiled code can do it.

        The returned function takes a signature, the address of each section's elements and the address for each
        section's average, which may be the same one. It averages if all ranks call it with the same signature, and
        returns whether they did. For the other ranks a call is an ``exchange`` of the signature and these bytes, in
        which a rank may request something else first. It takes one call of compiled code.

        Args:
            sections: for each the first byte, how many elements, and their type.
        """
        near = self._with_room(size)
        if near is None:
            return None
        prepared = native().Sections([(start, count, TYPES[dtype]) for start, count, dtype in sections], size)
        call = near.average
        if self.spans is not None:
            call = self.spans.timed(COLLECTIVE, "average", call, size, RANKS)

        def average(signed: bytes, given: Sequence[int], averages: Sequence[int]) -> bool:
            while True:
                try:
                    if call(signed, given, averages, prepared):
                        return True
                except (RuntimeError, OSError) as error:
                    raise named("exchange", error) from error
                if not self._served(near.rows()):
                    return False

        return average

    def ask(self, what: bytes) -> bool:
        """Have all ranks ``serve`` the request ``what``, each in its next exchange. See Note [Asking].

        When this returns the other ranks have begun, and this rank must take part. Return whether all ranks requested
        it.
        """
        while True:
            rows = self._exchange(_ASK + what)
            asked = _asked(rows)
            if asked == what:
                return all(row == _ASK + what for row in rows)
            assert asked is not None
            assert self.serve is not None
            self.serve(asked)

    def _served(self, rows: Sequence[memoryview]) -> bool:
        """Take part in a request that some rank made in place of the exchange; return whether there was one."""
        asked = _asked(rows) if self.serve is not None else None
        if asked is None:
            return False
        assert self.serve is not None
        self.serve(asked)
        return True


def _asked(rows: Sequence[memoryview]) -> bytes | None:
    """Return the request of the first rank that made one."""
    for row in rows:
        if row[: len(_ASK)] == _ASK:
            return bytes(row[len(_ASK) :])
    return None


# Note [Asking]
#
# A rank may need data of another one (the optimizer state, when it is sharded) at a place in the program that the
# others do not reach, such as a checkpoint in a branch of rank 0. It sends a request to all ranks. Each of the others
# reads it in the exchange that it waits in or reaches next; at the latest in the one at the program's end. It takes
# part in the request, and then begins its exchange again. Exchanges of all kinds begin with messages, so no thread is
# needed and no rank waits for something that cannot come. When several ranks make requests, the first rank is served
# first.
