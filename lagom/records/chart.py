"""``line_chart``: lines over time, as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

_WIDTH, _HEIGHT = 500, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 34, 40
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5539", "#666666")
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""
FAINT = 'stroke="currentColor" stroke-opacity=".15"'  # visible on a dark page, too
_MAX_POINTS = 400

Points = Sequence[tuple[float, float]]
"""Seconds and values."""


def line_chart(
    title: str, lines: Mapping[str, Points], unit: str = "", *, from_zero: bool = False, dashed: bool = True
) -> str:
    """Return an SVG element with a line for each of ``lines``, coloured by its position; empty without points.

    Args:
        lines: points by name; the first twelve names are shown.
        unit: text behind the numbers of the values.
        from_zero: whether the axis of the values begins at zero.
        dashed: whether lines but the first are dashed, so that equal lines below can be seen.
    """
    drawn = {name: _thinned([one for one in points if math.isfinite(one[1])]) for name, points in lines.items()}
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(drawn)}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return ""
    values = [y for points in drawn.values() for _, y in points]
    end = max(x for points in drawn.values() for x, _ in points) or 1.0
    ticks = round_ticks(0.0 if from_zero else min(values), max(values))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / end * (_WIDTH - _LEFT - _RIGHT)
        return across, _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="14" font-weight="600">{html.escape(title)}</text>']
    parts += _axes(ticks, end, unit, place)
    for number, (name, points) in enumerate(drawn.items()):
        colour = colours[name]
        # Ranks often have the same numbers: a lower line shows between the dashes of the upper one.
        dashes = f' stroke-dasharray="12 {12 * (number % len(_COLOURS))}"' if dashed and number % len(_COLOURS) else ""
        way = " ".join("{:.1f},{:.1f}".format(*place(*one)) for one in points)
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + (len(drawn) - number) % 4}" fill="{colour}"/>')
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        x = _LEFT + (number % 6) * 72
        y = _HEIGHT - 6 - 12 * (number // 6 % 2)
        if number < 12:
            parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{html.escape(name)}</text>')
    inside = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f"{inside}</svg>"
    )


def _axes(ticks: list[float], end: float, unit: str, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
    parts = []
    for tick in ticks:
        _, y = place(0, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {FAINT}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_text(tick)}{unit}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x, y = place(part * end, ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="{anchor}">{number_text(part * end)} s</text>')
    return parts


def _thinned(points: Points) -> Points:
    """Return every n-th point and the last, so that the page of a long run stays small."""
    step = -(-len(points) // _MAX_POINTS)
    return points if step < 2 else [*points[::step], points[-1]]


def round_ticks(low: float, high: float) -> list[float]:
    """Return round numbers around ``low`` and ``high``, at distances of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
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
