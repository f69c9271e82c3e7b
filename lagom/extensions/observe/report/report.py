"""``report``: one HTML page about a run, from its records; the page loads nothing from elsewhere."""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from lagom.extensions.observe.report.speed_section import speed_section
from lagom.extensions.observe.timeline.timeline_svg import timeline_section
from lagom.run_folder import RunFolder
from lagom.watch.chart import line_chart
from lagom.watch.html_page import page, settings_sections, shown, timings_bar
from lagom.watch.json_values import damage_named, loaded, loaded_lines, numbers_first, text_of
from lagom.watch.run_dir import PROGRESS, RESULT, RUN
from lagom.watch.stall_texts import rank_names
from lagom.watch.stragglers import Waits, straggler

_TAIL = 16_384  # bytes of each rank's output that the page shows
_MAX_RANKS = 16
"""Ranks whose lines a page shows, and outputs that differ; the rest is in the folder."""
_MAX_METRICS = 30
_LONGEST = 100  # characters of a list or a dict in the result
_CHARTS = (
    ("loss", "Loss of a batch", 1.0, ""),
    ("rate", "Samples per second", 1.0, ""),
    ("data", "Time spent waiting for data", 100.0, " %"),
    ("waits", "Time spent waiting for other ranks", 100.0, " %"),
    ("cpu", "Processors in use", 1.0, ""),
    ("memory", "Memory", 1e-9, " GB"),
    ("gpu", "accelerator in use", 100.0, " %"),
)

Events = Mapping[int, Sequence[Mapping[str, Any]]]
"""Reports of progress, by rank."""


def report(folder: RunFolder) -> str:
    """Return the page; it leaves out records that an interrupted run has not written.

    Raises:
        ValueError: when ``folder`` holds no run.
        LagomError: when its records are damaged.
    """
    run = loaded(folder, RUN)
    if not run:
        raise ValueError(f"{folder.path} holds no records of a run: there is no {RUN} in it")
    with damage_named(folder):
        return _page_of(folder, run)


def _page_of(folder: RunFolder, run: Mapping[str, Any]) -> str:
    result, events = loaded(folder, RESULT), events_of(folder)
    charts = ""
    for key, title, factor, unit in _CHARTS:
        charts += line_chart(title, lines_of(events, key, factor), unit, from_zero=key != "loss")
    said = _tail(folder, "lagom.log")
    parts = [
        f"<h1>{_text(run['name'])}</h1><p>{_text(_headline(run, result))}</p>",
        timings_bar(result.get("timings") or {}),
        _outcome(result),
        _failures(run.get("failures") or ()),
        speed_section(run.get("speed") or {}),
        _whole(run.get("whole") or ()),
        f"<div class=charts>{charts}</div>" if events else "<p>No rank has told of its progress.</p>",
        _damage(folder),
        _slowest(events),
        timeline_section(folder),
        _section("What lagom said", said, "wraps") if said else "",
        *_outputs(folder),
        *settings_sections(folder),
    ]
    return page(f"lagom: {run['name']}", parts)


def _headline(run: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    size = run.get("world_size", "?")
    where = f"{size} rank{'s' * (size != 1)} on {run.get('where', '?')}, begun {_utc_text(run.get('started', '?'))}"
    lasted = f", {result['seconds']:.2f} s" if "seconds" in result else ""
    return where + lasted + (f". {run['description']}" if run.get("description") else "")


def _outcome(result: Mapping[str, Any]) -> str:
    if not result:
        return "<p class=bad>It has no end: it is still going on, or its driver was killed.</p>"
    if result["outcome"] in ("returned", "interrupted") and result.get("value") is None:
        return f"<p class=good>It {'ended' if result['outcome'] == 'returned' else 'was interrupted'}.</p>"
    if result["outcome"] in ("returned", "interrupted"):
        return f"<p class=good>Result</p><pre>{_text(_by_lines(result['value']))}</pre>"
    text = f"{result['error']}: {result['message']}"
    return f"<p class=bad>{_text(text)}</p>" + (
        f"<pre>{_text(result['traceback'])}</pre>" if result.get("rank") is not None else ""
    )


def _failures(failures: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the losses after which the run began again."""
    if not failures:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("lost at", "rank", "host", "cause", "went on from", "seconds lost"))
    rows = ""
    for one in failures:
        lost = "" if one["seconds_lost"] is None else f"{one['seconds_lost']:.1f}"
        texts = (one["rank"], one["host"], one["cause"], one["resumed_from"] or "-", lost)
        rows += f"<tr><td class=whole>{_text(_utc_text(one['time']))}</td>"
        rows += "".join(f"<td>{_text('' if text is None else text)}</td>" for text in texts) + "</tr>"
    return f"<details open><summary>What was lost</summary><table><tr>{head}</tr>{rows}</table></details>"


def _whole(modules: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the modules that ran whole on every rank."""
    if not modules:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("module", "class", "calls", "share of forwards", "it", "what helps"))
    rows = ""
    for one in modules:
        inside = "; modules inside it are split" if one["splits_inside"] else ""
        texts = (one["name"], one["kind"], one["calls"], f"{one['share']:.1%}{inside}", one["text"], one["remedy"])
        rows += f"<tr>{''.join(f'<td>{_text(text)}</td>' for text in texts)}</tr>"
    return f"<details><summary>Modules that ran whole</summary><table><tr>{head}</tr>{rows}</table></details>"


def _slowest(events: Events) -> str:
    """Return sentences about a rank that waited long for data, and one that the others waited for, if there are any."""
    shares = {rank: sum(one.get("data") or 0 for one in own) / len(own) for rank, own in events.items() if own}
    rank = max(shares, key=lambda one: shares[one], default=None)
    said = ""
    if rank is not None and shares[rank] >= 0.1:
        said = f"<p>Rank {rank} waited {shares[rank]:.0%} of its time for data, more than any other.</p>"
    late = straggler({rank: _mean_waits(own) for rank, own in events.items() if own})
    if late is not None:
        said += f"<p>The others waited {late[1]:.0%} of their time for rank {late[0]}.</p>"
    return said


def _mean_waits(events: Sequence[Mapping[str, Any]]) -> Waits:
    waits_for: dict[str, float] = {}
    for one in events:
        for rank, share in (one.get("waits_for") or {}).items():
            waits_for[rank] = waits_for.get(rank, 0.0) + share / len(events)
    return Waits(sum(one.get("waits") or 0.0 for one in events) / len(events), waits_for)


def events_of(folder: RunFolder) -> dict[int, list[dict[str, Any]]]:
    """Return the progress reports of each rank, without damaged ones; empty if there are none."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in loaded_lines(folder, PROGRESS):
        if _is_report(event):
            found.setdefault(event["rank"], []).append(event)
    return dict(sorted(found.items()))


def _is_report(event: Mapping[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Return whether ``event`` has the types of a progress report."""
    if event is None or not _is_number(event.get("seconds")) or not math.isfinite(event["seconds"]):
        return False
    waits_for = event.get("waits_for") or {}
    numbers = [event.get(name) for name in ("samples", *(key for key, *_ in _CHARTS))]
    is_whole = isinstance(waits_for, dict) and all(map(_is_number, waits_for.values()))
    return is_whole and type(event.get("rank")) is int and all(one is None or _is_number(one) for one in numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 62)


def num_damaged(folder: RunFolder) -> int:
    """Return the number of lines in the file of progress reports that are none."""
    return sum(not _is_report(event) for event in loaded_lines(folder, PROGRESS))


def _damage(folder: RunFolder) -> str:
    number = num_damaged(folder)
    return f"<p class=bad>{number} lines of {PROGRESS} are damaged, and left out.</p>" if number else ""


def lines_of(events: Events, key: str, factor: float = 1.0) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and values of ``key``, times ``factor``, for a line of each of the first ``_MAX_RANKS`` ranks."""
    return {
        f"rank {rank}": [(one["seconds"], one[key] * factor) for one in own if one.get(key) is not None]
        for rank, own in list(events.items())[:_MAX_RANKS]
    }


def _tail(folder: RunFolder, name: str) -> str:
    if not folder.exists(name):
        return ""
    with open(folder.open_file(name), "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        text = file.read().decode(errors="replace")
    # A line that renews itself, as a progress bar does, is shown in its last state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return ("…\n" if size > _TAIL else "") + "\n".join(lines).strip("\n")


def _outputs(folder: RunFolder) -> list[str]:
    """Return a section for each output; ranks whose outputs have the same length and end share one."""
    ranks: dict[tuple[int, str], list[int]] = {}
    names = [name for name in folder.names() if re.fullmatch(r"rank-\d+\.log", name)]
    for name in sorted(names, key=_rank_of):
        if size := os.lstat(folder.at(name)).st_size:
            ranks.setdefault((size, _tail(folder, name)), []).append(_rank_of(name))
    outputs = list(ranks.items())[:_MAX_RANKS]
    return [_section(f"Output of {rank_names(own)}", text) for (_, text), own in outputs]


def _rank_of(log: str) -> int:
    return int(Path(log).stem.partition("-")[2])


def _utc_text(time: object) -> str:
    """Return a time of the records, which is in UTC, to the second; anything else as it is."""
    text = str(time)
    return f"{text[:19].replace('T', ' ')} UTC" if text.endswith("+00:00") else text


def _section(title: str, text: str, kind: str = "") -> str:
    opening = f"<pre class={kind}>" if kind else "<pre>"
    return f"<details open><summary>{_text(title)}</summary>{opening}{_text(text)}</pre></details>"


def _by_lines(value: Any) -> str:
    """Return a result as text: each metric on a line; a value of several lines, as a DataFrame, below its name."""
    if not isinstance(value, dict):
        return _brief(value)
    texts = {key: _brief(item) for key, item in list(numbers_first(value).items())[:_MAX_METRICS]}
    lines = [f"{key}:\n{text}" if "\n" in text else f"{key}: {text}" for key, text in texts.items()]
    return "\n".join([*lines, *([f"and {len(value) - len(texts)} more"] if len(value) > len(texts) else [])])


def _brief(value: Any) -> str:
    text = shown(value)
    return text_of(value, _LONGEST) if isinstance(value, (list, dict)) and len(text) > _LONGEST else text


def _text(value: object) -> str:
    return html.escape(str(value))
