"""``parallel_coordinates``: a line for each trial through its hyperparameters and its metric."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from lagom.extensions.search.pages.axis import Axis
from lagom.extensions.search.pages.best_value_chart import svg, trial_tooltip
from lagom.watch.chart import FAINT

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 300, 70, 60, 54, 16
_MAX_AXES = 12
_MAX_LINES = 300
_HALO = 'stroke="Canvas" stroke-width="3" paint-order="stroke"'
"""Keeps a text readable above lines, by an outline in the colour of the page."""
_COLOUR, _BEST = "#0072b2", "#d55e00"


def parallel_coordinates(
    trials: Sequence[Mapping[str, Any]], direction: str, metric: str, logarithmic: Collection[str] = ()
) -> str:
    """Return an SVG element, the better a trial the darker its line; empty with fewer than two trials to show.

    Only trials that ran to their end with a finite metric are shown, the best 300, with 12 hyperparameters at most. The
    best trial has a colour of its own.

    Args:
        logarithmic: names of the hyperparameters with a logarithmic scale.
    """
    sign = -1 if direction == "max" else 1
    shown = [one for one in trials if one["state"] == "complete" and math.isfinite(one["value"])]
    shown = sorted(shown, key=lambda one: sign * one["value"])[:_MAX_LINES]
    names = list(dict.fromkeys(name for one in shown for name in one["params"]))[:_MAX_AXES]
    if len(shown) < 2 or not names:
        return ""
    values_of = {name: [one["params"][name] for one in shown if name in one["params"]] for name in names}
    axes = [Axis.of_values(values, is_log=name in logarithmic) for name, values in values_of.items()]
    axes.append(Axis.of_numbers([one["value"] for one in shown]))
    step = (_WIDTH - _LEFT - _RIGHT) / len(names)
    title = "Hyperparameters of the trials that ran to their end"
    parts = [f'<text x="8" y="14" font-weight="600">{title}</text>']
    lines = []
    for rank, one in enumerate(shown):
        values = [(name in one["params"], one["params"].get(name)) for name in names] + [(True, one["value"])]
        places = [
            (_LEFT + number * step, _height(axis.place(value))) if is_there else None
            for number, (axis, (is_there, value)) in enumerate(zip(axes, values, strict=True))
        ]
        strength = 0.12 + 0.6 * (1 - rank / len(shown)) ** 2
        look = f'stroke="{_COLOUR}" stroke-opacity="{strength:.2f}"' if rank else f'stroke="{_BEST}" stroke-width="2.5"'
        lines.append(f"<g {look}>{_line(places)}<title>{trial_tooltip(one)}</title></g>")
    parts.append(f'<g fill="none" stroke-width="1.2">{"".join(reversed(lines))}</g>')
    for number, (axis, name) in enumerate(zip(axes, [*names, metric], strict=True)):
        parts += _axis(axis, name, _LEFT + number * step)
    return svg(title, _WIDTH, _HEIGHT, parts)


def _height(part: float) -> float:
    return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


def _line(places: Sequence[tuple[float, float] | None]) -> str:
    """Return the line through ``places``, interrupted where a trial has no such hyperparameter."""
    runs = [[place for place in run if place is not None] for is_there, run in groupby(places, bool) if is_there]
    return "".join(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in run)}"/>' for run in runs)


def _axis(axis: Axis, name: str, x: float) -> list[str]:
    short = name if len(name) <= 16 else name[:15] + "…"
    whole = f"<title>{html.escape(name)}</title>"
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
    at = f'x="{x:.1f}" y="{_TOP - 14}"'
    parts = [
        f'<line {ends} stroke="currentColor" stroke-opacity=".5"/>',
        f'<text {at} text-anchor="middle" font-weight="600">{html.escape(short)}{whole}</text>',
    ]
    for part, text in axis.marks:
        y = _height(part)
        parts.append(f'<line x1="{x - 4:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}" {FAINT}/>')
        at = f'x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {at} {_HALO}>{html.escape(text)}</text>")
    return parts
