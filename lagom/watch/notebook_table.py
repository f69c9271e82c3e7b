"""``NotebookTable``: a table in a notebook with each rank's progress; it stays after the end."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lagom.watch.notebook import NotebookCell
from lagom.watch.stall_texts import rank_names
from lagom.watch.stragglers import held_up
from lagom.wire.messages import ProgressReport

_SHOWN = 16
_COLUMNS = (
    "rank",
    "epoch",
    "step",
    "samples",
    "samples/s",
    "loss",
    "waits for data",
    "waits for ranks",
    "others wait for it",
    "CPUs",
    "memory",
    "device",
)
# Colours that are visible on white and dark pages, and that colour-blind readers can tell apart.
_RUNS, _DONE, _FAILED, _WAITS = "#2f8fd0", "#009e73", "#d55e00", "#808080"
_BAR = (
    "<div style='width:9em;height:.5em;background:rgba(128,128,128,.3);border-radius:3px'>"
    "<div style='width:{0:.0%};height:100%;background:{1};border-radius:3px'></div></div>"
)
# These override the table styles of notebook front ends: equal column widths, centered, numbers broken in two.
_TABLE = "table-layout:auto;margin:0;border-collapse:collapse"
_CELL = "text-align:left;white-space:nowrap;padding:.15em .8em .15em 0"
_HEAD = _CELL.replace("nowrap", "normal") + ";vertical-align:bottom"


class NotebookTable:
    """Shows a run's ranks as a table in a notebook's cell."""

    def __init__(self, display: Any, together: Callable[[Iterable[float]], float] = sum) -> None:
        """Combine the ranks' samples and rates by ``together``: ``max`` if all ranks train on the same samples."""
        self._display = display
        self._cell = NotebookCell(display)
        self._together = together

    def show(
        self,
        title: str,
        ranks: Mapping[int, ProgressReport | None],
        text: str,
        ended: str = "",
        stalled: Collection[int] = (),
    ) -> None:
        """Renew the table with the last heartbeat of each rank, if it has sent one; ``ended`` is the run's outcome."""
        self._cell.renew(table(title, ranks, ended, self._together, stalled), text)

    def wait(self, title: str, text: str) -> None:
        """Show ``text`` in place of a table: the run has not started yet, or has ended without progress."""
        self._cell.renew(_framed(f"<div>{_bold_name(f'{title}: {text}')}</div>", _WAITS), text)

    def show_notice(self, text: str) -> None:
        """Show a message of lagom below what the cell has shown so far."""
        said = text.removeprefix("lagom: ")
        page = _framed(f"<div style='white-space:pre-wrap'>{html.escape(said)}</div>", _WAITS)
        NotebookCell(self._display).renew(page, text)


def table(
    title: str,
    ranks: Mapping[int, ProgressReport | None],
    ended: str = "",
    together: Callable[[Iterable[float]], float] = sum,
    stalled: Collection[int] = (),
) -> str:
    """Return HTML of the ranks' last reports; of more than 16 ranks, the 16 that are farthest behind."""
    behind = sorted(sorted(ranks, key=lambda rank: (_samples(ranks[rank]), rank))[:_SHOWN])
    held = held_up(ranks)
    rows = [_row(rank, ranks[rank], held[rank], rank in stalled, bool(ended)) for rank in behind]
    columns = dict.fromkeys(itertools.chain(_COLUMNS, *rows))
    shown = [name for name in columns if any(row.get(name) for row in rows)]
    head = "".join(f"<th style='{_HEAD}'>{name}</th>" for name in shown)
    body = "".join(
        "<tr>" + "".join(f"<td style='{_CELL}'>{row.get(name, '')}</td>" for name in shown) + "</tr>" for row in rows
    )
    if len(ranks) > _SHOWN:
        more = f"{len(ranks) - _SHOWN} more ranks are as far as these or farther"
        body += f"<tr><td style='{_CELL}' colspan={len(shown)}>{more}</td></tr>"
    total = together(one.samples if one is not None else 0 for one in ranks.values())
    rate = together(one.rate or 0.0 if one is not None else 0.0 for one in ranks.values())
    if any(map(has_loaded, ranks.values())):
        told = f"{total:,} samples" + (f", <b>{html.escape(ended)}</b>" if ended else f", {rate:,.0f}/s")
        told += "" if ended or stalled else left(ranks)
    else:
        state = "starting" if any(map(is_starting, ranks.values())) else "running"
        told = f"<b>{html.escape(ended)}</b>" if ended else state
    if stalled and not ended:
        told += f", <b style='color:{_FAILED}'>{rank_names(sorted(stalled))} made no progress</b>"
    colour = _FAILED if stalled else _RUNS
    if ended:
        colour = {"done": _DONE, "interrupted": _WAITS}.get(ended, _FAILED)
    return _framed(
        f"<div>{_bold_name(title)}</div><div>{told}</div>"
        f"<table style='{_TABLE}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        colour,
    )


def _bold_name(title: str) -> str:
    name, colon, rest = title.partition(":")
    return f"<b>{html.escape(name)}</b>{colon}{html.escape(rest)}"


def _framed(inside: str, colour: str) -> str:
    """Return ``inside`` beside a line of ``colour``; wide tables scroll."""
    return f"<div style='overflow-x:auto;border-left:4px solid {colour};padding-left:.7em'>{inside}</div>"


def left(ranks: Mapping[int, ProgressReport | None]) -> str:
    """Return the time until the last rank ends its pass, as text; empty if it is unknown or less than a second."""
    slowest = 0.0
    for one in ranks.values():
        if one is None:
            continue
        if not one.steps or not one.steps_s:
            return ""
        slowest = max(slowest, (one.steps - (one.step or 0)) / one.steps_s)
    if slowest < 1:
        return ""
    minutes, seconds = divmod(round(slowest), 60)
    hours, minutes = divmod(minutes, 60)
    return ", this epoch ends in " + (f"{hours}:{minutes:02}" if hours else f"{minutes}") + f":{seconds:02}"


def has_loaded(one: ProgressReport | None) -> bool:
    """Return whether a heartbeat's rank has loaded a batch; always False without a DataLoader."""
    return one is not None and bool(one.epoch or one.step or one.samples)


def is_starting(one: ProgressReport | None) -> bool:
    """Return whether a rank has not called the function yet, or has sent no heartbeat."""
    return one is None or one.starts


def number_text(value: float) -> str:
    """Return a value of ``ProgressReport.values`` as text: a whole number with all digits, any other with four."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _samples(one: ProgressReport | None) -> float:
    return math.inf if one is None else one.samples


def _row(rank: int, report: ProgressReport | None, held: float, is_stalled: bool, has_ended: bool) -> dict[str, str]:
    """Return HTML by column; a column that is empty for all ranks is left out."""
    state = "" if is_stalled or has_ended else "starting" if is_starting(report) else "running"
    number = f"<b style='color:{_FAILED}'>{rank}</b>" if is_stalled else str(rank)
    if report is None:
        return dict.fromkeys(_COLUMNS, "") | {"rank": number, "epoch": state, "others wait for it": _share(held)}
    step, steps = report.step or 0, report.steps
    bar = _BAR.format(min(1.0, step / steps), _RUNS) if steps else ""
    return {
        "rank": number,
        "epoch": str(report.epoch or 0) if has_loaded(report) else state,
        "step": (f"{step}/{steps}{bar}" if steps else str(step)) if has_loaded(report) else "",
        "samples": f"{report.samples:,}" if has_loaded(report) else "",
        "samples/s": f"{report.rate:,.0f}" if report.rate else "",
        "loss": _loss(report.loss),
        "waits for data": _share(report.data),
        "waits for ranks": _share(report.waits, loud=False),
        "others wait for it": _share(held),
        "CPUs": f"{report.cpu:.1f}" if report.cpu is not None else "",
        "memory": f"{report.memory / 1e9:.2f} GB" if report.memory else "",
        "device": f"{report.gpu:.0%}" if report.gpu is not None else "",
        **{html.escape(name): number_text(value) for name, value in report.values.items()},
    }


def _loss(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else f"<b style='color:{_FAILED}'>{value}</b>"


def _share(value: float, loud: bool = True) -> str:
    if value < 0.005:
        return ""
    return f"<b style='color:{_FAILED}'>{value:.0%}</b>" if loud and value >= 0.1 else f"{value:.0%}"
