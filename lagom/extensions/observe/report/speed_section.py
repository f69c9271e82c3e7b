"""``speed_section``: HTML about the time of a training step: its parts, and the estimate for one process."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from lagom.speed import TITLES, Speed, duration

_COLOURS = {
    "loading": "#c99a2e",
    "forward": "#5f9ed1",
    "backward": "#2f5f9e",
    "exchange": "#c0392b",
    "optimizer": "#2a7f62",
    "own": "#8a8f98",
}


def speed_section(value: Mapping[str, Any]) -> str:
    """Return a bar for a step on the ranks and one for a step on one process, with a table; "" if no step was timed.

    Args:
        value: the JSON of a ``Speed``; empty for a run without one.
    """
    if not value or not value["steps"]:
        return ""
    speed = Speed.from_json(value)
    size = speed.world_size
    bars = {f"on {size} rank{'s' * (size != 1)}": {part.name: part.seconds for part in speed.parts}}
    if size > 1:
        bars["one process (estimate)"] = {part.name: part.in_one_process(size) for part in speed.parts}
    longest = max(sum(bar.values()) for bar in bars.values())
    rows = "".join(_bar(title, bar, longest) for title, bar in bars.items())
    advice = "".join(f"<p>{html.escape(_capitalised(text))}.</p>" for text in speed.advice)
    return (
        f"<details open><summary>Where a step's time goes (rank 0, mean of {speed.steps:,} steps)</summary>"
        f"<table class=steps>{rows}</table>{_table(speed)}{advice}</details>"
    )


def _bar(title: str, seconds: Mapping[str, float], longest: float) -> str:
    boxes = "".join(
        f"<i style='width:{one / longest:.3%};background:{_COLOURS[name]}' title='{html.escape(TITLES[name])}'></i>"
        for name, one in seconds.items()
        if one
    )
    total = duration(sum(seconds.values()))
    return f"<tr><th>{html.escape(title)}</th><td><div class=parts>{boxes}</div></td><td>{total}</td></tr>"


def _table(speed: Speed) -> str:
    size = speed.world_size
    names = ["part", "seconds of a step", "share", *(["on the ranks", "one process (estimate)"] if size > 1 else [])]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = ""
    for part in speed.parts:
        mark = f"<i class=mark style='background:{_COLOURS[part.name]}'></i>{html.escape(TITLES[part.name])}"
        texts = [duration(part.seconds), f"{part.seconds / speed.step_s:.0%}"]
        alone = part.in_one_process(size)
        texts += [part.how(size), duration(alone) if alone else "none"] if size > 1 else []
        rows += f"<tr><td>{mark}</td>{''.join(f'<td>{html.escape(text)}</td>' for text in texts)}</tr>"
    return f"<table class=columns><tr>{head}</tr>{rows}</table>"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
