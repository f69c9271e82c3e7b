"""Heartbeats of ranks, for tests of what shows or keeps them."""

from __future__ import annotations

from typing import Any

from lagom.wire.messages import ProgressReport

NOTHING: dict[str, Any] = {"epoch": 0, "step": 0, "steps": None, "samples": 0, "ticks": 0}
UNUSED: dict[str, Any] = {"rate": 0.0, "steps_s": 0.0, "data": 0.0, "waits": 0.0, "waits_for": {}}


def report_of(rank: int = 0, **facts: Any) -> ProgressReport:
    """Return a heartbeat of ``rank``; what is not in ``facts`` is as on a rank that has not begun to train."""
    return ProgressReport(rank=rank, **NOTHING | UNUSED | facts)
