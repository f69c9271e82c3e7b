"""``Answers``: what rank 0 was told by a service that it alone asks, for the other ranks, which would have too."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from lagom import files
from lagom.collectives.group import TIMEOUT_S
from lagom.collectives.run_store import SealedStore, reconnected
from lagom.errors import CollectiveError, LagomError
from lagom.tracking.serialization import decoded, encoded

if TYPE_CHECKING:
    from lagom.session.session import Session

_ALONE_S = 10.0
"""How long a rank waits for rank 0 to ask what it asks, once the program has asked for its rank: it may ask alone."""
_SOON_S, _LATER_S = 0.0005, 0.1
_FRAMES = 12
"""Of the program, that tell one of its calls from another."""
_OVER = "tracking/over"


class Answer(NamedTuple):
    """What came of a call of rank 0's."""

    asked: str
    """A digest of its arguments."""
    value: Any
    error: Exception | None


class Answers:
    """Rank 0 tells them as it goes, waiting for nobody; the others wait until it has. See Note [Answers]."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._connection: SealedStore | None = None

    def key(self, name: str, package: str) -> str:
        """Of a call of ``name`` that the program makes now, through ``package``: equal on all ranks that come here."""
        place = f"{name}\n{_place_in_program(package)}"
        with self._lock:
            self._counts[place] += 1
            number = self._counts[place]
        return f"tracking/{hashlib.sha256(f'{place}{number}'.encode()).hexdigest()[:24]}"

    def tell(self, key: str, answer: Answer) -> None:
        """To the other ranks; one with something in it that cannot be told is there, but without its value."""
        try:
            told = encoded([answer.asked, answer.value, answer.error])
        except TypeError:
            told = encoded([""])
        assert self._session.notes is not None
        self._session.notes.set(key, told)

    def over(self) -> None:
        """Rank 0 asks nothing any more."""
        assert self._session.notes is not None
        self._session.notes.set(_OVER, "")

    def wait(self, key: str) -> Answer | None:
        """Rank 0's answer; None when it cannot be told, or where rank 0 does not ask.

        Raises:
            LagomError: when rank 0 neither asks nor ends for as long as ranks wait for each other.
        """
        began, pause_s = time.monotonic(), _SOON_S
        try:
            store = self._own()
            # By looking: a wait on a store is logged by torch when it ends without an answer.
            while True:
                waited_s = time.monotonic() - began
                is_last = store.check(_OVER) or (files.has_asked() and waited_s > _ALONE_S)
                if store.check(key):
                    return self._taken(store, key)
                if is_last:
                    return None
                if waited_s > TIMEOUT_S:
                    raise LagomError(
                        f"rank {self._session.rank} waits for an answer that rank 0 has not asked for in "
                        f"{TIMEOUT_S:.0f} s: all ranks are to ask the same, or none after asking for lagom.rank()"
                    )
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LATER_S)
        except RuntimeError as error:
            if isinstance(error, LagomError):
                raise
            raise CollectiveError(
                f"an answer of rank 0's did not arrive, as a rule because it is gone: {error}"
            ) from error

    def _taken(self, store: SealedStore, key: str) -> Answer | None:
        text = store.get(key)
        if store.count(key + "/read") == self._session.world_size - 1:
            store.delete(key)
            store.delete(key + "/read")
        found = decoded(text)
        return Answer(*found) if len(found) == 3 else None

    def _own(self) -> SealedStore:
        # A wait holds up whoever else uses the connection.
        with self._lock:
            if self._connection is None:
                assert self._session.store is not None
                self._connection = SealedStore(reconnected(self._session.store), self._session.key)
            return self._connection


def digest(args: Any, kwargs: Any) -> str:
    """Of the arguments of a call; empty when they cannot be told from others."""
    try:
        return hashlib.sha256(encoded([args, kwargs]).encode()).hexdigest()[:24]
    except TypeError:
        return ""


def _place_in_program(package: str) -> str:
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < _FRAMES:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in (package, "lagom"):
            found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return "\n".join(found)


# Note [Answers]
#
# All ranks run the same program, so all of them ask a service the same: for a new run, for the best one so far. To ask
# once, rank 0 asks, and what it is told, an error too, is told to the others. It waits for nobody: a program may well
# guard what it asks by the rank, and then nobody comes for the answer.
#
# Which answer is whose goes by the place in the program (the lines of the innermost frames that are neither lagom's nor
# the package's) and how often a rank has come by there. Counting alone would give a rank the answer to another question
# where only some ranks ask. For the same reason the arguments are compared where a question only reads; where it makes
# something, they may differ (a name with the time in it), and rank 0's holds.
#
# A rank that rank 0 never answers has gone another way. It waits as long as for an exchange, and is named by the
# watchdog as one that stands there; or until rank 0 is at its end. Once the program has asked for its rank, it waits
# for some seconds only, as it may have meant to ask alone.
