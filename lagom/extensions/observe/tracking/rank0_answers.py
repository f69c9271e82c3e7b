"""``Answers``: the answers of a service that only rank 0 calls, for the same calls on the other ranks."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import traceback
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from lagom import disk as files
from lagom.errors import LagomError
from lagom.exchange.group import TIMEOUT_S
from lagom.extensions.observe.tracking.serialization import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.session.session import Session

_ALONE_S = 10.0
"""Seconds to wait for rank 0's answer once the program has asked for its rank: then one rank may call alone."""
_FRAMES = 12
"""Number of the program's innermost frames by which a call is identified."""
_OVER = "answers/over"


class RankZeroAnswer(NamedTuple):
    """The result of a call on rank 0: a value or an error."""

    arguments: str
    """Text of rank 0's arguments; "" if they are not compared."""
    value: Any
    error: Exception | None


class Answers:
    """Sends rank 0's answers to the other ranks, which wait for them; rank 0 does not wait. See Note [Answers].

    Args:
        session: this rank's session, with the ranks' store, through which the answers go.
        package: the service's package, whose frames are ignored when calls of the program are identified.
    """

    def __init__(self, session: Session, package: str) -> None:
        assert session.notes is not None
        self._notes = session.notes
        self._num_readers = session.world_size - 1
        self._timeout_s = TIMEOUT_S if session.config.debug is None else math.inf
        self._packages = (package, "lagom")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def key(self, method: str) -> str:
        """Return a key for the program's present call of ``method``.

        The key is equal on all ranks that make the call from the same place, after the same number of calls from there.
        """
        lines = (
            f"{os.path.basename(frame.f_code.co_filename)}:{line}"
            for frame, line in traceback.walk_stack(sys._getframe())
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in self._packages
        )
        place = "\n".join([method, *islice(lines, _FRAMES)])
        with self._lock:
            self._counts[place] += 1
            number = self._counts[place]
        return f"answers/{hashlib.sha256(f'{place}{number}'.encode()).hexdigest()[:24]}"

    def give(self, key: str, arguments: str, call: Callable[[], Any]) -> Any:
        """Call on rank 0, and send the result or error; if it cannot be encoded, send only that the call was made."""
        value, error = None, None
        try:
            value = call()
        except Exception as raised:
            error = raised
        try:
            text = encode([arguments, value, error])
        except TypeError:
            text = ""
        self._notes.set(key, text)
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """Tell the other ranks that rank 0 calls nothing any more."""
        self._notes.set(_OVER, "")

    def receive(self, key: str) -> RankZeroAnswer | None:
        """Return rank 0's answer to the call ``key``; None if it cannot be encoded, or rank 0 does not make the call.

        Raises:
            LagomError: if rank 0 neither makes the call nor ends its program for ``TIMEOUT_S`` seconds, unless the
                program has asked for its rank, or a person may be debugging rank 0 (``debug=``).
            CollectiveError: if the ranks' store is gone.
        """
        timeout_s = _ALONE_S if files.has_asked() else self._timeout_s
        try:
            text = self._notes.receive(key, self._num_readers, timeout_s, unless=_OVER)
        except TimeoutError as error:
            if files.has_asked() or self._notes.check(_OVER):
                return None
            raise LagomError(
                f"a rank waits for an answer that rank 0 has not asked for in {timeout_s:.0f} s: all ranks are to ask "
                "the same, or none after asking for lagom.rank()"
            ) from error
        return RankZeroAnswer(*decode(text)) if text else None


# Note [Answers]
#
# All ranks run the same program, so each of them would send the same requests to a service: for a new run, or for the
# best run so far. Instead only rank 0 calls the service, and sends the result or error to the other ranks.
# Rank 0 does not wait: the program may make the call on rank 0 only, and then no other rank reads the answer.
#
# An answer is identified by the place in the program (the lines of the innermost frames that belong neither to lagom
# nor to the service) and by the number of earlier calls from there. A number alone would give a rank the answer to
# another request if only some ranks make a call. For the same reason, the arguments of calls that only read are
# compared. Arguments of calls that create something may differ (a name may contain the time); rank 0's are used.
#
# A rank that gets no answer has taken another path than rank 0. It waits until rank 0's program ends, at most as long
# as for an exchange; meanwhile the stall detector (host/stall_detector.py) reports the rank. If the program has called
# ``lagom.rank()``, the rank waits for some seconds only, since the program may make the call on this rank alone.
