"""``timeline_svg``: some steps of a run's trace, as SVG; ``share_table``: how each rank spent its time."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.errors import LagomError
from lagom.extensions.observe.timeline.timeline import SUMMARY, TRACE
from lagom.run_folder import RunFolder
from lagom.watch.json_values import damage_named, loaded

_WIDTH, _LEFT, _ROW, _TOP = 1000, 150, 18, 34
_MAX_RANKS = 8
_STEPS = 4
_FIRST = 5
"""First step shown, if there are that many: earlier steps contain probes."""
_LARGEST = 64 << 20
"""Largest trace, in bytes, that is read for a picture."""
_COLOURS = {
    "data": "#e69f00",
    "copy": "#cc79a7",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "optimizer": "#009e73",
    "collective": "#7f5539",
    "wait": "#d55e00",
}
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""
_ROWS = ("program", "collectives")
_NAMES = {
    "data": "data",
    "copy": "copy",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "moving": "exchanging",
    "waiting": "waiting for ranks",
    "rest": "the rest",
}

Events = Sequence[Mapping[str, Any]]


def timeline_section(folder: RunFolder) -> str:
    """Return HTML about the timeline of the run in ``folder``; empty if there is none, a line if it is damaged."""
    try:
        told = loaded(folder, SUMMARY)
        table = share_table(told) if told else ""
    except (LagomError, KeyError, TypeError) as error:
        return f"<p class=bad>There is no timeline: {html.escape(str(error))}</p>"
    return f"<details open><summary>Where the time has gone</summary>{_drawn(folder)}{table}</details>" if table else ""


def _drawn(folder: RunFolder) -> str:
    """Return the picture of a run's trace; empty if there is none, a line if it is damaged."""
    try:
        if folder.exists(TRACE) and os.lstat(folder.at(TRACE)).st_size <= _LARGEST:
            with damage_named(folder):
                return timeline_svg(loaded(folder, TRACE).get("traceEvents", ()))
    except LagomError as error:
        return f"<p class=bad>There is no picture of the timeline: {html.escape(str(error))}</p>"
    return ""


def share_table(summary: Mapping[str, Any]) -> str:
    """Return HTML of the result of ``lagom.extensions.observe.timeline.time_breakdown.summary``."""
    head = "".join(f"<th>{name}</th>" for name in ("", *_NAMES.values(), "came last", "held up the others"))
    rows = ""
    for rank, one in summary["ranks"].items():
        shares = "".join(f"<td>{one['shares'][name]:.1%}</td>" for name in _NAMES)
        late = f"<td>{one['came_last']} of {one['exchanges']}</td><td>{one['held_up_s']:.3g} s</td>"
        rows += f"<tr><th>rank {html.escape(rank)}</th>{shares}{late}</tr>"
    return f"<table>{head}{rows}</table><p>Of the steps that the trace has, but for the first.</p>"


def timeline_svg(events: Events) -> str:
    """Return some steps of the first ranks, as SVG; empty if there are none."""
    begin, end = _part(events)
    ranks = sorted({event["pid"] for event in events})[:_MAX_RANKS]
    if end <= begin:
        return ""
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    places: dict[tuple[int, str], int] = {}
    parts = [_legend()]
    for number, (rank, row) in enumerate((rank, row) for rank in ranks for row in _ROWS):
        y = _TOP + number * (_ROW + 3) + 6 * (number // len(_ROWS))
        places[rank, row] = y
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 13}" text-anchor="end">rank {rank}: {row}</text>')
        wide = f'width="{_WIDTH - _LEFT}" height="{_ROW}"'
        parts.append(f'<rect x="{_LEFT}" y="{y}" {wide} fill="currentColor" fill-opacity=".06"/>')
    scale = (_WIDTH - _LEFT) / (end - begin)
    for event in events:
        place = places.get((event["pid"], names.get((event["pid"], event.get("tid", -1)), "")))
        if event["ph"] != "X" or place is None or event["ts"] >= end or event["ts"] + event["dur"] <= begin:
            continue
        left, right = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        parts.append(_box(_LEFT + (left - begin) * scale, place, (right - left) * scale, event))
    height = max(places.values()) + _ROW + 22
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x, time = _LEFT + part * (_WIDTH - _LEFT), part * (end - begin) / 1000
        parts.append(f'<text x="{x:.0f}" y="{height - 5}" text-anchor="{anchor}">{time:.3g} ms</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Timeline" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">{"".join(parts)}</svg>'
    )


def _part(events: Events) -> tuple[float, float]:
    """Return start and end, in microseconds, of the part shown: some steps of the first rank."""
    steps = [event for event in events if event.get("cat") == "step" and event["pid"] == events[0]["pid"]]
    if not steps:
        slices = [event for event in events if event["ph"] == "X"]
        return min((e["ts"] for e in slices), default=0.0), max((e["ts"] + e["dur"] for e in slices), default=0.0)
    first = min(_FIRST, max(0, len(steps) - _STEPS))
    shown = steps[first : first + _STEPS]
    return shown[0]["ts"], shown[-1]["ts"] + shown[-1]["dur"]


def _legend() -> str:
    parts, x = [], _LEFT
    for name, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="16">{name}</text>')
        x += 112
    return "".join(parts)


def _box(x: float, y: float, width: float, event: Mapping[str, Any]) -> str:
    colour = _COLOURS.get(event["cat"], "#999999")
    name = html.escape(event["name"])
    size = f", {event['args']['bytes']:,} bytes" if "bytes" in event.get("args", {}) else ""
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{_ROW}" fill="{colour}">'
        f"<title>{name}{size}, {event['dur']:.0f} us</title></rect>"
    )
    if width < 7 * len(event["name"]):
        return box
    return box + f'<text x="{x + 3:.2f}" y="{y + 13}" fill="#fff" pointer-events="none">{name}</text>'
