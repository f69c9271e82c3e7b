"""How far a run is, for a person: a line or a table that renews itself, or a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from lagom.monitor.link import Message
from lagom.monitor.notebook import Table, left, notebook
from lagom.monitor.stragglers import straggler

_TERMINAL_S = 0.5
_LOG_S = 10.0
_SHOWN = 4  # ranks
_WAITS = 0.1  # share of its time that a rank may wait for data without a word of it


class Progress:
    """Shows a run on standard error."""

    def __init__(self, plan: Any, where: str, also: Callable[[str], None] | None = None) -> None:
        """``also`` gets what is said once, such as who waits for whom."""
        self._also = also
        self._name = plan.name
        self._world_size = plan.world_size
        self._where = where
        self._ranks: dict[int, Message] = {}
        self._hosts: dict[str, list[int]] = {}
        self._said_waiting = False
        display = notebook()
        self._table = Table(display) if display is not None else None
        self._live = sys.stderr.isatty() or self._table is not None
        self._shown_at = time.monotonic() if not self._live else 0.0
        self._line = ""

    def show(self, event: Message) -> None:
        """Take in ``event``, and show it when it is time to."""
        if event["type"] == "join":
            self._hosts.setdefault(str(event["host"]).split("|")[0], []).extend(event["ranks"])
            if sum(map(len, self._hosts.values())) == self._world_size:
                self._say(f"lagom: {self._name}: {self._topology()}")
        elif event["type"] == "progress":
            before = self._ranks.get(event["rank"], {})
            # A loss is there to be read only as long as the program keeps it.
            self._ranks[event["rank"]] = event | {"loss": event.get("loss") or before.get("loss")}
            if time.monotonic() - self._shown_at >= (_TERMINAL_S if self._live else _LOG_S):
                self._shown_at = time.monotonic()
                self._renew()

    def waiting(self, joined: int, wanted: int) -> None:
        """Say once that tasks have not started yet."""
        if joined < wanted and not self._said_waiting:
            self._said_waiting = True
            others = "" if joined else "; or they cannot reach this process: then their output comes at the end"
            self._say(
                f"lagom: {self._name}: waiting for {self._where} to start the tasks "
                f"({joined} of {wanted} are here{others})"
            )

    def warn(self, text: str) -> None:
        """Say ``text``, lines below the first indented."""
        first, *more = text.splitlines()
        self._say("\n".join([f"lagom: {self._name}: {first}", *(f"    {line}" for line in more)]))

    def unheard(self) -> None:
        """Say that nothing will be shown of this run until it ends."""
        self._say(
            f"lagom: {self._name}: the executors of {self._where} cannot reach this process: "
            "no live output or progress; what rank 0 prints is shown at the end"
        )

    def clear(self) -> None:
        """Make room for a line of the user's program."""
        if self._line:
            sys.stderr.write("\r" + " " * len(self._line) + "\r")
            sys.stderr.flush()
            self._line = ""

    def close(self) -> None:
        """Leave the last state standing."""
        if self._table is not None and self._ranks:
            self._renew()
        if self._line:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._line = ""

    def _topology(self) -> str:
        ranks = "1 rank" if self._world_size == 1 else f"{self._world_size} ranks"
        hosts = ", ".join(f"{host}: {_spans(sorted(ranks))}" for host, ranks in sorted(self._hosts.items()))
        return f"{ranks} on {self._where} ({hosts})"

    def _renew(self) -> None:
        if self._table is not None:
            self._table.show(f"{self._name} on {self._where}", self._ranks, f"lagom: {self._text()}")
        elif not self._live:
            sys.stderr.write(f"lagom: {self._text()}\n")
        else:
            self.clear()
            self._line = f"lagom: {self._text()}"[:160]
            sys.stderr.write(self._line)
        sys.stderr.flush()

    def _text(self) -> str:
        # Of many, also the one that is the farthest behind.
        first = sorted(self._ranks)[:_SHOWN]
        last = min(self._ranks, key=lambda rank: (self._ranks[rank].get("samples", 0), rank))
        shown = [self._rank_text(rank) for rank in first + [last] * (last not in first)]
        more = len(self._ranks) - len(shown)
        return " | ".join(shown) + (f" | and {more} more ranks" if more else "") + left(self._ranks)

    def _rank_text(self, rank: int) -> str:
        event = self._ranks[rank]
        step = f"step {event.get('step', 0)}" + (f"/{event['steps']}" if event.get("steps") else "")
        parts = [f"epoch {event.get('epoch', 0)}", step, f"{event.get('samples', 0):,} samples"]
        if event.get("rate"):
            parts.append(f"{event['rate']:,.0f}/s")
        if event.get("loss") is not None:
            parts.append(f"loss {event['loss']:.4g}")
        if event.get("data", 0.0) >= _WAITS:
            parts.append(f"waits {event['data']:.0%} of its time for data")
        if (late := straggler(self._ranks)) is not None and late[0] == rank:
            parts.append(f"the others wait for it {late[1]:.0%} of their time")
        if event.get("memory"):
            parts.append(f"{event['memory'] / 1e9:.1f} GB")
        return f"rank {rank}: {', '.join(parts)}"

    def _say(self, text: str) -> None:
        self.clear()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        if self._also is not None:
            self._also(text)


def _spans(ranks: list[int]) -> str:
    """ "rank 0", "ranks 0-3", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
