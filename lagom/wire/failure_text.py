"""A rank's failure inside an error message of Spark's: the only text that Spark carries back of a failed task."""

from __future__ import annotations

import base64

FAILURE = "lagom-failure:"


def failure_text(report: str, error: bytes, timeline: str = "[]") -> str:
    """A failure as text that survives Spark's error messages; ``failure_in`` finds it there again."""
    parts = report.encode(), error, timeline.encode()
    return FAILURE + ":".join(base64.b64encode(part).decode() for part in parts) + ":end"


def failure_in(text: str) -> tuple[str, bytes, str] | None:
    """Report, parcelled exception and timeline in an error message of Spark's, or None.

    Of a message that was cut off the report is there, and what is whole of the others.
    """
    if FAILURE not in text:
        return None
    report, _, rest = text.split(FAILURE, 1)[1].partition(":")
    error, _, rest = rest.partition(":")
    timeline, end, _ = rest.partition(":end")
    found = b"" if not end else base64.b64decode(timeline)
    try:
        return base64.b64decode(report).decode(), base64.b64decode(error, validate=True), found.decode() or "[]"
    except ValueError:
        return base64.b64decode(report).decode(), b"", "[]"
