"""``Timings``: the seconds since a call, divided into named parts."""

from __future__ import annotations

import time

PARTS = {
    "earlier": "earlier processes of the run",
    "prepare": "checks, plan and sources",
    "frame": "DataFrame written",
    "verify": "rehearsals",
    "lost": "attempts that were lost",
    "slots": "call sent, waiting for slots",
    "start": "ranks start, and unpack the call",
    "function": "the function: epochs",
    "trials": "trials",
    "collect": "result collected",
}
"""What is done in each part, in the order of time."""
DIGITS = 6


class Timings:
    """One clock of a run, from the call on: each moment belongs to one part, so that the parts' sum is the whole.

    Args:
        earlier_s: seconds that earlier processes of the same run took.
    """

    def __init__(self, earlier_s: float = 0.0) -> None:
        self._mark = self._began = time.monotonic()
        self._parts: dict[str, float] = {}
        self.add_earlier(earlier_s)

    @property
    def began(self) -> float:
        """Monotonic time of the call."""
        return self._began

    def add_earlier(self, seconds: float) -> None:
        """Count ``seconds`` that earlier processes of the same run took."""
        if seconds > 0:
            self._parts["earlier"] = seconds

    def end(self, part: str, after_s: float | None = None) -> None:
        """Count the time since the last call as ``part``, all or ``after_s`` seconds of it."""
        self.end_at(part, time.monotonic() if after_s is None else self._mark + after_s)

    def end_at(self, part: str, at: float | None) -> None:
        """Count the time until the monotonic time ``at`` as ``part``; do nothing for None."""
        if at is None:
            return
        at = min(max(at, self._mark), time.monotonic())
        if at > self._mark:
            self._parts[part] = self._parts.get(part, 0.0) + at - self._mark
        self._mark = at

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part that took time, in the order of ``PARTS``."""
        return {name: round(self._parts[name], DIGITS) for name in PARTS if self._parts.get(name)}

    def seconds(self) -> float:
        """Return the sum of all parts."""
        return round(sum(self.parts().values()), DIGITS)
