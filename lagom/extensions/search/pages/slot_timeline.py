"""``slot_timeline``: a chart with a row for each slot, and in it the trials at their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lagom.extensions.search.pages.best_value_chart import COLOURS, svg, trial_tooltip
from lagom.watch.chart import number_text, round_ticks

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 1000, 70, 70, 20, 30
_MAX_SLOTS = 64
_PAUSE_S = 60.0
"""Longest time without any trial that is shown; longer ones, as before a search was resumed, are left out."""


def slot_timeline(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG element with a row for each slot, at most 64; empty if no trial has a start time."""
    timed = [one for one in trials if one.get("started") is not None and one.get("seconds") is not None]
    if not timed:
        return ""
    begins = starts(timed)
    slots = sorted({one["slot"] for one in timed})
    end = max(begins[one["number"]] + held_s(one) for one in timed) or 1e-9
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    title, share = "Slots", busy_share(sum(map(held_s, timed)), len(slots), end)
    parts = [f'<text x="8" y="14" font-weight="600">{title}, {share:.0%} busy</text>']
    for row, slot in enumerate(slots[:_MAX_SLOTS]):
        y = _TOP + row * (_ROW + 3)
        own = [one for one in timed if one["slot"] == slot]
        busy = busy_share(sum(map(held_s, own)), 1, end)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">slot {slot}</text>')
        wide = f'width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}"'
        parts.append(f'<rect x="{_LEFT}" y="{y}" {wide} fill="currentColor" fill-opacity=".06"/>')
        parts += [_box(one, _LEFT + begins[one["number"]] * scale, y, scale) for one in own]
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{y + 14}">{busy:.0%} busy</text>')
    bottom = _TOP + len(slots[:_MAX_SLOTS]) * (_ROW + 3) + 14
    for tick in round_ticks(0.0, end):
        if tick <= end:
            x = _LEFT + tick * scale
            parts.append(f'<text x="{x:.1f}" y="{bottom}" text-anchor="middle">{number_text(tick)} s</text>')
    return svg(title, _WIDTH, bottom + 8, parts)


def busy_share(seconds: float, num_slots: int, window_s: float) -> float:
    """Return the share of ``window_s`` for which ``num_slots`` slots had a trial, for ``seconds`` in all.

    The window is the time from the first trial of the search to the end of the last one.
    """
    return min(1.0, seconds / (num_slots * window_s)) if num_slots and window_s > 0 else 0.0


def held_s(trial: Mapping[str, Any]) -> float:
    """Return the seconds for which a slot had ``trial``: it prepared the trial, and ran it."""
    return float(trial["seconds"]) + float(trial.get("prepare_s") or 0.0)


def starts(trials: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the start of each trial by number, in seconds from the first; gaps above ``_PAUSE_S`` are left out."""
    began_at: dict[int, float] = {}
    skipped, busy_until = 0.0, float("inf")
    for one in sorted(trials, key=lambda trial: float(trial["started"])):
        began = float(one["started"])
        if not began_at:
            skipped = began
        elif began - busy_until > _PAUSE_S:
            skipped += began - busy_until
        began_at[one["number"]] = began - skipped
        ended = began + held_s(one)
        busy_until = max(busy_until, ended) if len(began_at) > 1 else ended
    return began_at


def _box(trial: Mapping[str, Any], x: float, y: float, scale: float) -> str:
    """Return the box of a trial, whose slot got it at ``x``, with a pale part for the time until it began."""
    prepare_s, width = float(trial.get("prepare_s") or 0.0), trial["seconds"] * scale
    pale = (
        f'<rect x="{x:.2f}" y="{y}" width="{prepare_s * scale:.2f}" height="{_ROW}" fill="{COLOURS[trial["state"]]}" '
        f'fill-opacity=".3"><title>{trial_tooltip(trial)}, prepared for {prepare_s:.3g} s</title></rect>'
    )
    x += prepare_s * scale
    shown = max(width - 0.6, 0.4)
    box = (pale if prepare_s * scale >= 0.5 else "") + (
        f'<rect x="{x:.2f}" y="{y}" width="{shown:.2f}" height="{_ROW}" rx="2" fill="{COLOURS[trial["state"]]}">'
        f"<title>{trial_tooltip(trial)}, {trial['seconds']:.3g} s</title></rect>"
    )
    number = str(trial["number"])
    if width < 7 * len(number) + 4:
        return box
    colour = "#000" if trial["state"] == "pruned" else "#fff"
    return box + f'<text x="{x + 4:.2f}" y="{y + 14}" fill="{colour}" pointer-events="none">{number}</text>'
