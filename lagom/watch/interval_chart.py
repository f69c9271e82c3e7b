"""``interval_chart``: horizontal bars with confidence intervals, as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lagom.watch.chart import FAINT, number_text, round_ticks

_WIDTH, _LABELS, _RIGHT, _TOP, _ROW, _BOTTOM = 620, 190, 20, 34, 24, 36
_COLOURS = ("#0072b2", "#d55e00")
"""Colours of bars to the right and to the left; colour-blind readers can tell them apart (Okabe and Ito, 2008)."""
_LONGEST = 30  # characters of a label


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar from zero to ``value``, with an interval from ``low`` to ``high`` if they are known."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def interval_chart(title: str, bars: Sequence[Bar], axis: str = "") -> str:
    """Return an SVG element with ``bars`` from top to bottom; empty if there are none.

    Args:
        axis: text below the numbers.
    """
    drawn = [bar for bar in bars if math.isfinite(bar.value)]
    if not drawn:
        return ""
    ends = [end for bar in drawn for end in (bar.value, bar.low, bar.high) if end is not None and math.isfinite(end)]
    marks = round_ticks(min(0.0, *ends), max(0.0, *ends))
    height = _TOP + _ROW * len(drawn) + _BOTTOM

    def across(value: float) -> float:
        return _LABELS + (value - marks[0]) / (marks[-1] - marks[0]) * (_WIDTH - _LABELS - _RIGHT)

    parts = [f'<text x="8" y="16" font-weight="600">{html.escape(title)}</text>']
    for mark in marks:
        x, end = across(mark), height - _BOTTOM + 4
        strength = 'stroke="currentColor" stroke-opacity=".6"' if mark == 0 else FAINT
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{end}" {strength}/>')
        parts.append(f'<text x="{x:.1f}" y="{end + 12}" text-anchor="middle">{number_text(mark)}</text>')
    middle = across((marks[0] + marks[-1]) / 2)
    parts.append(f'<text x="{middle:.1f}" y="{height - 4}" text-anchor="middle">{html.escape(axis)}</text>')
    for row, bar in enumerate(drawn):
        parts += _bar(bar, _TOP + _ROW * row, across(0.0), across(bar.value))
        if bar.low is not None and bar.high is not None and math.isfinite(bar.high - bar.low):
            parts += _interval(across(bar.low), across(bar.high), _TOP + _ROW * row + _ROW / 2 - 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f"{''.join(parts)}</svg>"
    )


def _bar(bar: Bar, top: float, zero: float, end: float) -> list[str]:
    label = bar.label if len(bar.label) <= _LONGEST else bar.label[: _LONGEST - 1] + "…"
    colour = _COLOURS[bar.value < 0]
    whole = f"<title>{html.escape(bar.label)}</title>"
    place = f'x="{min(zero, end):.1f}" y="{top + 2}" width="{abs(end - zero):.1f}" height="14"'
    return [
        f'<text x="{_LABELS - 8}" y="{top + 13}" text-anchor="end">{html.escape(label)}{whole}</text>',
        f'<rect {place} fill="{colour}" fill-opacity=".55"/>',
    ]


def _interval(low: float, high: float, y: float) -> list[str]:
    line = 'stroke="currentColor" stroke-width="1.4"'
    return [
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}" {line}/>',
        *(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4:.1f}" y2="{y + 4:.1f}" {line}/>' for x in (low, high)),
    ]
