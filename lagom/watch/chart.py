"""``line_chart``: lines over time, as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

_WIDTH, _HEIGHT = 500, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 26, 34, 40
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5539", "#666666")
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""
FAINT = 'stroke="currentColor" stroke-opacity=".15"'  # visible on a dark page, too
_MAX_POINTS = 400
_MOST = 1e300
"""Largest number that is drawn: the arithmetic of axes goes beyond it."""

Points = Sequence[tuple[float, float]]
"""Seconds and values."""


def line_chart(
    title: str, lines: Mapping[str, Points], unit: str = "", *, from_zero: bool = False, dashed: bool = True
) -> str:
    """Return an SVG element with a line for each of ``lines``, coloured by its position; empty without points.

    If there are more lines than colours, all have one colour and are translucent.

    Args:
        lines: points by name.
        unit: text behind the numbers of the values.
        from_zero: whether the axis of the values begins at zero.
        dashed: whether lines but the first are dashed, so that equal lines below can be seen.
    """
    drawn = {name: _thinned([one for one in points if _can_be_drawn(one)]) for name, points in lines.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    are_many = len(drawn) > len(_COLOURS)
    colours = {name: _COLOURS[0 if are_many else number % len(_COLOURS)] for number, name in enumerate(lines)}
    values = [y for points in drawn.values() for _, y in points]
    end = max(x for points in drawn.values() for x, _ in points)
    end = end if end > 0 else 1.0
    ticks = round_ticks(0.0 if from_zero else min(values), max(values))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / end * (_WIDTH - _LEFT - _RIGHT)
        return across, _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="14" font-weight="600">{html.escape(title)}</text>']
    parts += _axes(ticks, end, unit, place)
    for number, (name, points) in enumerate(drawn.items()):
        # Ranks often have the same numbers: a lower line shows between the dashes of the upper one.
        style = f' stroke-dasharray="12 {12 * number}"' if dashed and number and not are_many else ""
        style += ' stroke-opacity=".35"' if are_many else ""
        parts.append(_line([place(*one) for one in points], colours[name], style, 3 + (len(drawn) - number) % 4))
    parts += _legend({f"{len(drawn)} lines": _COLOURS[0]} if are_many else {name: colours[name] for name in drawn})
    inside = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
        f"{inside}</svg>"
    )


def _line(points: Points, colour: str, style: str, radius: int) -> str:
    """Return a line through ``points``, in pixels; a circle if there is one."""
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>'


def _axes(ticks: list[float], end: float, unit: str, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    parts = []
    for tick in ticks:
        _, y = place(0, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {FAINT}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_text(tick)}{unit}</text>')
    for seconds, text in _time_ticks(end):
        x, y = place(seconds, ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{text}</text>')
    return parts


def _time_ticks(end: float) -> list[tuple[float, str]]:
    """Return round times from 0 to ``end`` in seconds, with their texts: at most seven from two minutes on."""
    if end < 120:
        return [(tick, f"{number_text(tick)} s") for tick in round_ticks(0.0, end) if tick <= end]
    unit, name, steps = (60, "min", (1, 2, 5, 10, 15, 30)) if end <= 180 * 60 else (3600, "h", (1, 2, 3, 6, 12, 24))
    units = end / unit
    step = next((step for step in steps if units / step <= 6), 24 * math.ceil(units / 24 / 6))
    return [(number * unit, f"{number} {name}") for number in range(0, int(units) + 1, step)]


def _legend(colours: Mapping[str, str]) -> list[str]:
    """Return the names of lines below the chart, one beside the other."""
    parts, x = [], float(_LEFT)
    for name, colour in colours.items():
        parts.append(f'<text x="{x:.0f}" y="{_HEIGHT - 6}" fill="{colour}">{html.escape(name)}</text>')
        x += 6.3 * len(name) + 8
    return parts


def _can_be_drawn(point: tuple[float, float]) -> bool:
    x, y = point
    return math.isfinite(x) and abs(y) <= _MOST


def _thinned(points: Points) -> Points:
    """Return every n-th point and the last, so that the page of a long run stays small."""
    step = -(-len(points) // _MAX_POINTS)
    return points if step < 2 else [*points[::step], points[-1]]


def round_ticks(low: float, high: float) -> list[float]:
    """Return round numbers around ``low`` and ``high``, at distances of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high)
    span = span if span > 1 / _MOST else 1.0
    rough = span / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    last += first == last
    return [number * step for number in range(first, last + 1)]


def number_text(value: float) -> str:
    """Return ``value`` as short text, mostly with four digits."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
