"""``best_value_chart``: every trial's metric as a dot, and the best one so far as a line."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lagom.extensions.search.pages.axis import Axis
from lagom.result import short
from lagom.watch.chart import FAINT, number_text, round_ticks

WIDTH, HEIGHT = 500, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 34, 52
COLOURS = {"complete": "#0072b2", "pruned": "#e69f00", "failed": "#d55e00"}
"""Colours of trials, which colour-blind readers can tell apart (Okabe and Ito, 2008)."""
_LINE = "#009e73"
_MAX_DOTS = 2000

Trials = Sequence[Mapping[str, Any]]


def best_value_chart(title: str, trials: Trials, direction: str, across: Callable[[Any], float], unit: str) -> str:
    """Return an SVG element; empty if no trial has a finite metric.

    Args:
        across: returns the value of a trial on the horizontal axis.
        unit: unit behind the numbers of that axis.
    """
    valued = [one for one in trials if one["value"] is not None and math.isfinite(one["value"])]
    if not valued:
        return ""
    axis = Axis.of_numbers([one["value"] for one in valued])
    ticks = round_ticks(0.0, max(max(map(across, trials)), 1e-9))
    end = max(map(across, trials)) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / end * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - y * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="14" font-weight="600">{html.escape(title)}</text>']
    for part, text in axis.marks:
        y = place(0, part)[1]
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {FAINT}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in ticks:
        if tick <= end * 1.001:
            x, y = place(tick, 0)
            parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{number_text(tick)}{unit}</text>')
    for one in trials[:_MAX_DOTS]:
        if one in valued:
            parts.append(_dot(one, *place(across(one), axis.place(one["value"]))))
        elif one["state"] == "failed":
            parts.append(_dot(one, *place(across(one), 0)))
    way = " ".join("{:.1f},{:.1f}".format(*place(x, axis.place(y))) for x, y in _best(valued, direction, across, end))
    parts.append(f'<polyline points="{way}" fill="none" stroke="{_LINE}" stroke-width="1.8"/>')
    parts += _legend({one["state"] for one in trials})
    return svg(title, WIDTH, HEIGHT, parts)


def svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Return an SVG element in the colours of the page around it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f"{''.join(parts)}</svg>"
    )


def trial_tooltip(trial: Mapping[str, Any]) -> str:
    """Return the tooltip of a trial, as escaped HTML."""
    value = f": {short(trial['value'])}" if trial["value"] is not None else ""
    params = ", ".join(f"{name}={short(one)}" for name, one in trial["params"].items())
    return html.escape(f"trial {trial['number']}, {trial['state']}{value}\n{params}\n{short_error(trial)}".strip())


def short_error(trial: Mapping[str, Any]) -> str:
    """Return the beginning of a failed trial's error, at most 100 characters on one line."""
    return " ".join(str(trial.get("error") or "").split())[:100]


def _best(trials: Trials, direction: str, across: Callable[[Any], float], end: float) -> Sequence[tuple[float, float]]:
    """Return the corners of the line of the best value so far."""
    points: list[tuple[float, float]] = []
    better = max if direction == "max" else min
    for one in sorted(trials, key=across):
        if one["state"] != "complete":
            continue
        before = points[-1][1] if points else one["value"]
        value = better(before, one["value"])
        points += [(across(one), before), (across(one), value)]
    return [*points, (end, points[-1][1])] if points else []


def _dot(trial: Mapping[str, Any], x: float, y: float) -> str:
    colour = COLOURS[trial["state"]]
    whole = f"<title>{trial_tooltip(trial)}</title>"
    if trial["state"] == "complete":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}" fill-opacity=".75">{whole}</circle>'
    if trial["state"] == "pruned":
        shape = f'cx="{x:.1f}" cy="{y:.1f}" r="3" fill="none" stroke="{colour}" stroke-width="1.5"'
        return f'<circle {shape} pointer-events="all">{whole}</circle>'
    way = f"M{x - 3:.1f},{y - 3:.1f}l6,6m0,-6l-6,6"
    return f'<path d="{way}" stroke="{colour}" stroke-width="1.8">{whole}</path>'


def _legend(states: set[str]) -> list[str]:
    parts, x, y = [], float(_LEFT), HEIGHT - 10
    names = {"complete": "complete", "pruned": "stopped early (last value)", "failed": "failed"}
    for state, name in names.items():
        if state in states:
            shown: dict[str, Any] = {"state": state, "number": "", "value": None, "params": {}}
            parts.append(_dot(shown, x + 4, y - 4).partition("<title>")[0].rstrip(">") + "/>")
            parts.append(f'<text x="{x + 12:.0f}" y="{y}">{name}</text>')
            x += 26 + 6 * len(name)
    parts.append(
        f'<line x1="{x:.0f}" x2="{x + 14:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{_LINE}" stroke-width="1.8"/>'
    )
    parts.append(f'<text x="{x + 19:.0f}" y="{y}">best so far</text>')
    return parts
