"""Encodes a rank's failure into an error message: Spark returns nothing else to the driver from a failed task."""

from __future__ import annotations

import base64
import re

FAILURE = "lagom-failure:"
_PARTS = re.compile(FAILURE + r"([A-Za-z0-9+/]+=*):(?:([A-Za-z0-9+/]*=*):(?:([A-Za-z0-9+/]*=*):end)?)?")
"""The parts of a failure: whatever follows a part shows that the part is whole."""


def failure_text(report: str, error: bytes, timeline: str = "[]") -> str:
    """Encode a failure as text that survives Spark's error messages; ``failure_in`` decodes it."""
    parts = report.encode(), error, timeline.encode()
    return FAILURE + ":".join(base64.b64encode(part).decode() for part in parts) + ":end"


def failure_in(text: str) -> tuple[str, bytes, str] | None:
    """Return the report, pickled exception and timeline in Spark's error messages; None if no report in them is whole.

    If a message was cut off after the report, the exception is b"" unless it is whole, and the timeline is "[]". Of
    several messages the one with the most whole parts counts.
    """
    found = max(_PARTS.findall(text), key=lambda parts: sum(map(bool, parts)), default=None)
    if found is None:
        return None
    report, error, timeline = map(base64.b64decode, found)
    return report.decode(), error, timeline.decode() or "[]"
