"""``page``: the frame of lagom's HTML pages, and the parts that pages of runs and of searches share."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.cluster import NVIDIA, kind_of_device
from lagom.run_folder import RunFolder
from lagom.timings import PARTS
from lagom.watch.json_values import loaded
from lagom.watch.run_dir import RESULT, RUN


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page with ``parts``, which are HTML, one below the other."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(title)}</title>{_STYLE}"
    return f"{head}<body>{''.join(parts)}\n"


def settings_sections(folder: RunFolder) -> list[str]:
    """Return HTML of a run's settings and surroundings, from the records in ``folder``."""
    run, result = loaded(folder, RUN), loaded(folder, RESULT)
    return [
        _table("Settings", run.get("config", {})),
        _table("Versions", run.get("versions", {})),
        _table("Ranks", {f"rank {rank}": _place(one) for rank, one in run.get("ranks", {}).items()}),
        _table("Git", _checkout(run.get("git") or {})),
        _table("Driver", {**run.get("driver", {}), **_durations(run, result)}),
    ]


def _place(one: Mapping[str, Any]) -> str:
    words = [f"{one['host']} ({one['ip']})"]
    words += [f"task {one['task']}"] if one.get("task") is not None else []
    if device := one.get("gpu"):  # one of NVIDIA's, or the name of another maker's
        words.append(f"GPU {device}" if kind_of_device(device) == NVIDIA else device)
    return ", ".join(words + [f"{name} {one[name]}" for name in ("python", "torch") if name in one])


def _checkout(git: Mapping[str, Any]) -> dict[str, Any]:
    if not git:
        return {}
    changes = git.get("changes")
    said = "not known" if changes is None else "\n".join(changes) or "none"
    return {**git, "changes": said}


def _durations(run: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    seconds = {"seconds until the ranks had joined": run.get("seconds_to_join"), "seconds": result.get("seconds")}
    again = "\n".join(f"{one['time']}, from {one['from']}" for one in run.get("resumed", ()))
    found = {"started": run.get("started")} | ({"resumed": again} if again else {})
    return found | {name: value for name, value in seconds.items() if value is not None}


def timings_bar(parts: Mapping[str, float]) -> str:
    """Return HTML with a bar of a run's time, divided into its parts, with a line for each part below."""
    total = sum(parts.values())
    if not total:
        return ""
    colours = dict(zip(PARTS, _PART_COLOURS, strict=True))
    shown = {name: seconds for name, seconds in parts.items() if seconds >= 0.005 or seconds >= total / 100}
    boxes = "".join(
        f"<i style='flex:{seconds / total:.5f};background:{colours.get(name, '#888')}' title='{_text(name)}'></i>"
        for name, seconds in parts.items()
    )
    lines = "".join(
        f"<span><i style='background:{colours.get(name, '#888')}'></i>{_text(PARTS.get(name, name))} "
        f"<b>{seconds:.2f} s</b></span>"
        for name, seconds in shown.items()
    )
    return f"<div class=parts>{boxes}</div><div class=legend>{lines}</div>"


def _table(title: str, rows: Mapping[str, Any]) -> str:
    cells = "".join(f"<tr><th>{_text(key)}</th><td>{_text(shown(value))}</td></tr>" for key, value in rows.items())
    return f"<details><summary>{_text(title)}</summary><table>{cells}</table></details>" if rows else ""


def shown(value: Any) -> str:
    """Return a value of the records as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    return html.escape(str(value))


_PART_COLOURS = (
    "#8a8f98", "#b7bcc4", "#c99a2e", "#8e6bbf", "#c0392b", "#e0a458", "#5f9ed1", "#2a7f62", "#3c9a76", "#7a5c3e",
)  # fmt: skip
"""One for each of ``PARTS``."""
_STYLE = """<style>
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
h1 { font-size: 1.5em; margin-bottom: 0 }
pre { background: #f5f5f5; padding: .7em; overflow-x: auto; font-size: 13px; margin: .4em 0 }
.good { color: #1a6b2f; font-weight: 600; margin-bottom: 0 } .bad { color: #a3131c; font-weight: 600 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1em; margin: 1em 0 }
summary { cursor: pointer; font-weight: 600; margin-top: .8em }
th { text-align: left; padding-right: 1.5em; font-weight: 500; vertical-align: top; white-space: nowrap }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #16181c } pre { background: #24272d } .good { color: #6fcf87 } .bad { color: #ff8a80 }
}
.parts { display: flex; height: 14px; border-radius: 3px; overflow: hidden; margin-top: .6em }
.legend { font-size: 13px; margin: .3em 0 1em } .legend span { margin-right: 1.4em; white-space: nowrap }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums }
.steps { width: 100% } .steps .parts { margin-top: 0 } .steps td:nth-child(2) { width: 100%; padding-right: 1em }
.steps td, .steps th { white-space: nowrap; vertical-align: middle }
.columns td, .columns th { padding-right: 1.5em }
.mark { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em }
.wraps { white-space: pre-wrap }
td.whole { white-space: nowrap; padding-right: 1em }
td { font-family: ui-monospace, monospace; font-size: 13px; word-break: break-word; white-space: pre-wrap }
</style>"""
