"""``live_table``: a running search in a notebook: its progress, the best trial, and the trial of each slot."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.extensions.search.pages.axis import shown

_MAX_SLOTS = 16
_MAX_NAMES = 6
"""Largest number of hyperparameters that have a column each; more are shown in one column."""
_LONGEST = 24  # characters of a cell
_LONGEST_LINE = 100
_BAR = (
    "<div style='width:24em;max-width:100%;height:.5em;margin:.3em 0;background:rgba(128,128,128,.3);"
    "border-radius:3px'><div style='width:{0:.0%};height:100%;background:#2f8fd0;border-radius:3px'></div></div>"
)
# These override the table styles of notebook front ends: equal column widths, centered, numbers broken in two.
_TABLE = "table-layout:auto;margin:.3em 0;border-collapse:collapse"
_CELL = "text-align:left;white-space:nowrap;padding:.15em 1em .15em 0"
_IDLE = "opacity:.5"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRow:
    """One slot: its trial, if it has one, and the last report of the trial."""

    slot: int
    host: str
    trial: int | None = None
    params: Mapping[str, Any]
    step: int | None = None
    value: float | None = None
    seconds: float = 0.0


def live_table(title: str, lines: Sequence[str], done: float | None, failure: str, rows: Sequence[SlotRow]) -> str:
    """Return the HTML of a running search; slots that the table has no room for are only counted.

    Args:
        title: HTML of the first line.
        lines: texts below the title.
        done: fraction of the trials that have ended; None if the number of trials is not known.
        failure: error of the trial that failed last; "" if none has.
    """
    parts = [f"<div>{title}</div>", *(f"<div>{html.escape(line)}</div>" for line in lines)]
    if done is not None:
        parts.insert(1, _BAR.format(min(1.0, done)))
    if failure:
        parts.append(f"<div style='color:#d55e00'>{html.escape(cut(failure))}</div>")
    if rows:
        parts.append(_table(rows[:_MAX_SLOTS], several_hosts=len({row.host for row in rows}) > 1))
    if len(rows) > _MAX_SLOTS:
        parts.append(f"<div style='{_IDLE}'>and {len(rows) - _MAX_SLOTS} more slots</div>")
    return f"<div style='overflow-x:auto'>{''.join(parts)}</div>"


def cut(text: str, longest: int = _LONGEST_LINE) -> str:
    """Return the beginning of ``text`` as one line."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _table(rows: Sequence[SlotRow], several_hosts: bool) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.params))
    columns = names if len(names) <= _MAX_NAMES else ["hyperparameters"]
    head = ["slot", *(["host"] if several_hosts else []), "trial", "step", "value", "seconds", *columns]
    body = _line("th", head)
    for row in rows:
        place = [str(row.slot), *([row.host.partition(".")[0]] if several_hosts else [])]
        if row.trial is None:
            body += _line("td", [*place, "idle", *[""] * (len(head) - len(place) - 1)], _IDLE)
            continue
        params = [shown(row.params[name], _LONGEST) if name in row.params else "" for name in columns]
        if columns != names:
            params = [cut(", ".join(f"{name}={shown(value, _LONGEST)}" for name, value in row.params.items()))]
        step = str(row.step) if row.step is not None else ""
        value = f"{row.value:.6g}" if row.value is not None else ""
        body += _line("td", [*place, str(row.trial), step, value, f"{row.seconds:.0f}", *params])
    return f"<table style='{_TABLE}'>{body}</table>"


def _line(tag: str, texts: Sequence[str], style: str = "") -> str:
    cells = "".join(f"<{tag} style='{_CELL}'>{html.escape(text)}</{tag}>" for text in texts)
    return f"<tr style='{style}'>{cells}</tr>"
