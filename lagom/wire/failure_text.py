"""Encodes a rank's failure into an error message: Spark returns nothing else to the driver from a failed task."""

from __future__ import annotations

import base64

FAILURE = "lagom-failure:"


def failure_text(report: str, error: bytes, timeline: str = "[]") -> str:
    """Encode a failure as text that survives Spark's error messages; ``failure_in`` decodes it."""
    parts = report.encode(), error, timeline.encode()
    return FAILURE + ":".join(base64.b64encode(part).decode() for part in parts) + ":end"


def failure_in(text: str) -> tuple[str, bytes, str] | None:
    """Return the report, pickled exception and timeline in a Spark error message; None if it contains no failure.

    If the message was cut off after the report, the timeline is "[]", and the exception may be b"" or cut off.

    Raises:
        ValueError: if the report itself was cut off.
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
