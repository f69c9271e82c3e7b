"""``search_page``: one HTML page about a search; the page loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.extensions.search.pages.axis import shown
from lagom.extensions.search.pages.best_value_chart import best_value_chart, short_error
from lagom.extensions.search.pages.slot_timeline import held_s, starts
from lagom.run_folder import RunFolder
from lagom.watch.html_page import page, settings_sections

_MAX_ROWS = 1000
_LONGEST = 24  # characters of a hyperparameter


def search_page(title: str, facts: Sequence[str], parts: Sequence[str], folder: RunFolder | None) -> str:
    """Return the page: ``facts`` are paragraphs, ``parts`` HTML; the settings in ``folder``, if any, come last."""
    head = f"<h1>{html.escape(title)}</h1>" + "".join(f"<p>{html.escape(fact)}</p>" for fact in facts)
    return page(f"lagom: {title}", [head, *parts, *(settings_sections(folder) if folder is not None else ())])


def value_charts(trials: Sequence[Mapping[str, Any]], direction: str) -> str:
    """Return HTML of the best value so far, over the trials and over time."""
    over_trials = best_value_chart("Best value over trials", trials, direction, lambda one: one["number"], "")
    timed = [one for one in trials if one.get("started") is not None and one.get("seconds") is not None]
    begins = starts(timed)
    over_time = ""
    if timed:
        over_time = best_value_chart(
            "Best value over time", timed, direction, lambda one: begins[one["number"]] + held_s(one), " s"
        )
    return f"<div class=charts>{over_trials}{over_time}</div>"


def narrow(chart: str) -> str:
    """Return HTML of a chart that does not take the page's whole width."""
    return f"<div style='max-width:44em;margin:1em 0'>{chart}</div>"


def trial_table(trials: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return HTML with a row for each of the first 1,000 ``trials``; ``names`` are the hyperparameters' names."""
    head = ["trial", "value", *names, "seconds", "slot", "state"]
    rows = [
        [
            str(one["number"]),
            shown(one["value"]) if one["value"] is not None else "",
            *(shown(one["params"][name], _LONGEST) if name in one["params"] else "" for name in names),
            f"{one['seconds']:.3g}" if one.get("seconds") is not None else "",
            str(one["slot"]) if one.get("slot") is not None else "",
            f"failed: {short_error(one)}" if one["state"] == "failed" else one["state"],  # last: the longest
        ]
        for one in trials[:_MAX_ROWS]
    ]
    more = f"<p>and {len(trials) - _MAX_ROWS} more</p>" if len(trials) > _MAX_ROWS else ""
    return f"<details open><summary>Trials</summary>{_table(head, rows)}{more}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    style = "white-space:nowrap;padding:.1em 1.2em .1em 0"
    lines = [("th", head), *(("td", row) for row in rows)]
    body = "".join(
        "<tr>" + "".join(f"<{tag} style='{style}'>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"
        for tag, texts in lines
    )
    return f"<div style='overflow-x:auto'><table style='border-collapse:collapse'>{body}</table></div>"
