"""``Table``: how far each rank is, in a notebook: a table that renews itself, and stays where it stood at the end."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from typing import Any

from lagom.monitor.link import Message
from lagom.monitor.stragglers import held_up

_SHOWN = 16
_HEAD = (
    *("rank", "epoch", "step", "samples", "samples/s", "loss"),
    *("waits for data", "waits for ranks", "others wait for it", "processors", "memory", "GPU"),
)
_BAR = (
    "<div style='width:9em;height:.6em;background:#e4e4e4;border-radius:3px'>"
    "<div style='width:{0:.0%};height:100%;background:#0072b2;border-radius:3px'></div></div>"
)


def notebook() -> Any:
    """IPython's display module where this process is a notebook's kernel, else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return ipython.display if shell is not None and hasattr(shell, "kernel") else None


class Table:
    """One display of a notebook's cell.

    Front ends that show no HTML get the text.
    """

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, title: str, ranks: Mapping[int, Message], text: str) -> None:
        """Renew it, with the last report of each rank."""
        bundle = {"text/html": table(title, ranks), "text/plain": text}
        if self._handle is None:
            self._handle = self._display.display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def table(title: str, ranks: Mapping[int, Message]) -> str:
    """HTML of the ranks' last reports; of many ranks, those that are farthest behind."""
    behind = sorted(ranks, key=lambda rank: (ranks[rank].get("samples", 0), rank))[:_SHOWN]
    held = held_up(ranks)
    rows = "".join(_row(rank, ranks[rank], held[rank]) for rank in sorted(behind))
    more = f"<tr><td colspan={len(_HEAD)}>{len(ranks) - _SHOWN} more ranks are ahead of these</td></tr>"
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _HEAD)
    total = sum(one.get("samples", 0) for one in ranks.values())
    rate = sum(one.get("rate") or 0.0 for one in ranks.values())
    caption = f"<b>{html.escape(title)}</b>: {total:,} samples, {rate:,.0f}/s{left(ranks)}"
    return (
        f"<table><caption style='text-align:left'>{caption}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}{more * (len(ranks) > _SHOWN)}</tbody></table>"
    )


def left(ranks: Mapping[int, Message]) -> str:
    """Time that the pass has still to go at the last rate of the slowest rank, as text."""
    slowest = 0.0
    for one in ranks.values():
        step, steps, speed = one.get("step") or 0, one.get("steps"), one.get("steps_s")
        if not steps or not speed:
            return ""
        slowest = max(slowest, (steps - step) / speed)
    if slowest < 1:
        return ""
    minutes, seconds = divmod(round(slowest), 60)
    hours, minutes = divmod(minutes, 60)
    return ", this epoch ends in " + (f"{hours}:{minutes:02}" if hours else f"{minutes}") + f":{seconds:02}"


def _row(rank: int, one: Message, held: float) -> str:
    step, steps = one.get("step") or 0, one.get("steps")
    bar = _BAR.format(min(1.0, step / steps)) if steps else ""
    loss, data = one.get("loss"), one.get("data") or 0.0
    cells = (
        str(rank),
        str(one.get("epoch") or 0),
        f"{step}/{steps}{bar}" if steps else str(step),
        f"{one.get('samples', 0):,}",
        f"{one['rate']:,.0f}" if one.get("rate") else "",
        f"{loss:.4g}" if loss is not None else "",
        _share(data),
        f"{one.get('waits') or 0.0:.0%}",
        _share(held),
        f"{one['cpu']:.1f}" if one.get("cpu") is not None else "",
        f"{one['memory'] / 1e9:.2f} GB" if one.get("memory") else "",
        f"{one['gpu']:.0%}" if one.get("gpu") is not None else "",
    )
    return "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"


def _share(value: float) -> str:
    return f"<b>{value:.0%}</b>" if value >= 0.1 else f"{value:.0%}"
