"""``notebook_chart``: two small charts of a run, for a notebook; ``report`` has the rest."""

from __future__ import annotations

from lagom.extensions.observe.report.report import events_of, lines_of
from lagom.run_folder import RunFolder
from lagom.watch.chart import line_chart

_LEAST = 3
"""Fewest reports of a rank for a useful line."""


def notebook_chart(folder: RunFolder) -> str:
    """Return HTML of the loss and the samples per second over time; empty if there are few reports."""
    events = events_of(folder)
    if max((len(own) for own in events.values()), default=0) < _LEAST:
        return ""
    charts = [
        line_chart(title, lines_of(events, key), from_zero=key == "rate")
        for key, title in (("loss", "Loss"), ("rate", "Samples per second"))
    ]
    return "".join(
        f"<div style='width:30em;max-width:100%;display:inline-block;margin-right:1em'>{one}</div>"
        for one in charts
        if one
    )
