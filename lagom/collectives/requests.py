"""``RequestExchange``: exchanges of messages, in which a rank may ask the others for something else first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lagom.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ASK = b"lagom asks for:\0"
"""How a message begins that is no part of an exchange."""


class RequestExchange(ABC):
    """Exchanges that serve who asks. See Note [Asking]."""

    def __init__(self) -> None:
        self.serve: Callable[[bytes], None] | None = None
        """Takes part in what another rank has asked for."""

    @abstractmethod
    def _exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """What all ranks gave, of whatever kind."""

    def exchange(self, head: bytes, body: memoryview | None = None) -> list[memoryview]:
        """What all ranks gave, ``head`` and ``body`` in one, in rank order; lengths may differ.

        Fast for what is small. Views are valid until the next call; in this rank's own place is ``head`` alone.
        """
        rows = self._exchange(head, body)
        while self._served(rows):
            rows = self._exchange(head, body)
        return rows

    def ask(self, what: bytes) -> bool:
        """Have all ranks ``serve`` what this one asks for, in the exchange that each comes to next. See Note [Asking].

        When this returns the others have begun, and this rank is to take part. Gives whether all have asked for it.
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
        """Take part in what some rank has asked for in place of the exchange, if any has."""
        asked = _asked(rows) if self.serve is not None else None
        if asked is None:
            return False
        assert self.serve is not None
        self.serve(asked)
        return True


def _asked(rows: Sequence[memoryview]) -> bytes | None:
    """What the first of the ranks that ask for something asks for."""
    for row in rows:
        if row[: len(_ASK)] == _ASK:
            return bytes(row[len(_ASK) :])
    return None


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Raise what fails in here as a CollectiveError that says what did."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise named(operation, error) from error


def named(operation: str, error: Exception) -> CollectiveError:
    """What to raise where ``operation`` failed with ``error``."""
    return CollectiveError(f"{operation} failed, as a rule because another rank is gone: {error}")


# Note [Asking]
#
# A rank may need what another one holds (the state of an optimizer that is shared out) at a place of the program that
# the others do not come to: a checkpoint in a branch of rank 0's. It says so in a message to all, which each of the
# others reads where it stands in, or comes to, an exchange of its own; at the latest the one at the program's end. They
# take part in what was asked for, and then begin their exchange again. Exchanges of all kinds begin with messages, so
# nothing waits for anything else, and no thread is needed. Where several ranks ask, the first is served first.
