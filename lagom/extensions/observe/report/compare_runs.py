"""``compare_runs``: says what differs between two runs: settings, versions, code, results, and curves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.extensions.observe.report.report import events_of, num_damaged
from lagom.run_folder import RunFolder
from lagom.watch.json_values import damage_named, loaded
from lagom.watch.run_dir import PROGRESS, RESULT, RUN
from lagom.watch.runs import aligned, checkout_text, result_text

_PARTS = (0.25, 0.5, 0.75)
"""Shares of a run's samples at which losses are compared, beside the last one."""
_SHARE, _SPEED = "loss at {:.0%} of the samples", "samples per second of rank 0"
_LONGEST = 60  # characters of a setting
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # left out: an object's address says nothing, and differs in each run


def compare_runs(first: RunFolder, second: RunFolder) -> str:
    """Return a table of what differs between two runs, and of their losses and speeds.

    Raises:
        ValueError: when a folder holds no run.
        LagomError: when the records of one are damaged.
    """
    facts = [_facts(folder) for folder in (first, second)]
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows: list[Sequence[str]] = [("", first.path.name, second.path.name)]
    for key in keys:
        texts = [_shown(one[key]) if key in one else "-" for one in facts]
        if texts[0] != texts[1]:
            rows.append((key, *texts))
    curves = [_curve(folder) for folder in (first, second)]
    rows += [(key, text, curves[1][key]) for key, text in curves[0].items() if {text, curves[1][key]} != {"-"}]
    rows += [("result", result_text(first), result_text(second))]
    return "\n".join(aligned(rows))


def _facts(folder: RunFolder) -> dict[str, Any]:
    """Return everything about a run that may explain its numbers, by name."""
    run, result = loaded(folder, RUN), loaded(folder, RESULT)
    if not run:
        raise ValueError(f"{folder.path} holds no records of a run: there is no {RUN} in it")
    with damage_named(folder):
        return _facts_of(run, result) | {f"damaged lines of {PROGRESS}": num_damaged(folder)}


def _facts_of(run: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    found = _flat(run.get("config") or {})
    found |= {"world_size": run.get("world_size"), "where": run.get("where"), "source": run.get("source")}
    found |= _flat(run.get("versions") or {})
    git = run.get("git") or {}
    found |= {"git": checkout_text(git), "changes": ", ".join(git.get("changes") or ())}
    found["losses of ranks"] = len(run.get("failures") or ())
    found["seconds"] = result.get("seconds", "-")
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``settings`` with the entries of inner dicts by names such as "hparams.lr"."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _curve(folder: RunFolder) -> dict[str, str]:
    """Return rank 0's loss at some shares of its samples and at the end, and its mean speed; "-" where unknown."""
    events = [one for one in events_of(folder).get(0, []) if one.get("samples") is not None]
    losses = [one for one in events if one.get("loss") is not None]
    cells = dict.fromkeys((*map(_SHARE.format, _PARTS), "last loss", _SPEED), "-")
    if losses:
        last = losses[-1]["samples"]
        at = [next(one for one in losses if one["samples"] >= part * last) for part in (*_PARTS, 1.0)]
        for part, one, later in zip(_PARTS, at, at[1:], strict=False):
            if one is not later:  # else the report comes too late for this share, so it has no loss
                cells[_SHARE.format(part)] = f"{one['loss']:.6g}"
        cells["last loss"] = f"{losses[-1]['loss']:.6g}"
    if len(events) > 1 and events[-1]["seconds"] > events[0]["seconds"]:
        begin, end = events[0], events[-1]
        speed = (end["samples"] - begin["samples"]) / (end["seconds"] - begin["seconds"])
        cells[_SPEED] = f"{speed:,.0f}"
    return cells


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else repr(value)
    text = _ADDRESS.sub("", " ".join(text.split()))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
