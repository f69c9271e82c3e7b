"""``Progress``: shows a run's progress: a line or a table that renews itself, or a line now and then in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from lagom.monitor.notebook_table import NotebookTable, left, notebook
from lagom.monitor.stragglers import straggler
from lagom.wire.client import Message

_TERMINAL_S = 0.5
_LOG_S = 10.0
_IDLE_S = 2.0
_SHOWN = 4  # ranks
_WIDTH = 160  # characters of a line if a terminal does not say how many it has
_WAITS = 0.1  # share of its time that a rank may wait for data without mention


class Progress:
    """Shows a run on standard error."""

    def __init__(
        self, plan: Any, where: str, also: Callable[[str], None] | None = None, every_s: float | None = None
    ) -> None:
        """Show ``plan``'s run; ``also`` receives messages that are shown once, such as which rank waits for which.

        Renew the line after ``every_s`` seconds; by default sooner in a terminal than in a log.
        """
        self._also = also
        self._name = plan.name
        self._world_size = plan.world_size
        self._where = where
        self._is_here = plan.launcher == "local"
        self._ranks: dict[int, Message] = {}
        self._hosts: dict[str, list[int]] = {}
        self._said_waiting = False
        display = notebook()
        self._table = (
            NotebookTable(display, max if plan.config.batches == "whole" else sum) if display is not None else None
        )
        self._live = sys.stderr.isatty() or self._table is not None
        self._every_s = every_s if every_s is not None else _TERMINAL_S if self._live else _LOG_S
        self._shown_at = time.monotonic() if not self._live else 0.0
        self._began = time.monotonic()
        self._line = ""
        self._open = False
        """Whether the program has begun a line and not ended it."""

    def show(self, event: Message) -> None:
        """Store ``event``, and show it when it is time."""
        if event["type"] == "join":
            self._hosts.setdefault(str(event["host"]).split("|")[0], []).extend(event["ranks"])
            if sum(map(len, self._hosts.values())) == self._world_size:
                self._say(f"lagom: {self._name}: {self._topology()}")
        elif event["type"] == "progress":
            before = self._ranks.get(event["rank"], {})
            loss = event.get("loss")
            # A loss can be read only as long as the program keeps it.
            self._ranks[event["rank"]] = event | {"loss": loss if loss is not None else before.get("loss")}
            if self._worth_showing() and time.monotonic() - self._shown_at >= self._every_s:
                self._shown_at = time.monotonic()
                self._renew()

    def waiting(self, joined: int, wanted: int) -> None:
        """Tell once that tasks have not started yet."""
        if joined < wanted and not self._said_waiting:
            self._said_waiting = True
            here = joined or self._is_here
            others = "" if here else "; or they cannot reach this process: then their output comes at the end"
            self._say(
                f"lagom: {self._name}: waiting for {self._where} to start the tasks "
                f"({joined} of {wanted} are here{others})"
            )

    def warn(self, text: str) -> None:
        """Show ``text``, lines below the first indented."""
        first, *more = text.splitlines()
        self._say("\n".join([f"lagom: {self._name}: {first}", *(f"    {line}" for line in more)]))

    def picture(self, png: str, path: os.PathLike[str] | None) -> None:
        """Show the program's picture, given as base64, in a notebook; elsewhere tell where it is kept."""
        display = notebook()
        kept = f"it is in {path}" if path is not None else "it is not kept, since run_dir is None"
        if display is not None:
            display.display({"image/png": png, "text/plain": f"a picture of rank 0; {kept}"}, raw=True)
        else:
            self.warn(f"rank 0 showed a picture; {kept}")

    def unheard(self) -> None:
        """Print that executors cannot reach the driver, so that output appears only at the end of the run."""
        self._say(
            f"lagom: {self._name}: the executors of {self._where} cannot reach this process: "
            "no live output or progress; what rank 0 prints is shown at the end"
        )

    def make_room(self, file: TextIO, text: str) -> None:
        """Make room for the program's ``text`` on ``file``, standard output or error."""
        self._clear()
        if file is sys.stderr or (self._live and self._table is None and file.isatty()):
            self._open = not text.endswith("\n")

    def close(self, ended: str = "") -> None:
        """Leave the last state standing; ``ended`` is the outcome of the run."""
        if self._table is not None and self._ranks and self._worth_showing():
            self._table.show(self._title(), self._ranks, f"lagom: {self._text(_WIDTH * 4, ended)}", ended)
        if self._line:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._line = ""

    def _topology(self) -> str:
        ranks = "1 rank" if self._world_size == 1 else f"{self._world_size} ranks"
        hosts = ", ".join(f"{host}: {_spans(sorted(ranks))}" for host, ranks in sorted(self._hosts.items()))
        return f"{ranks} on {self._where} ({hosts})"

    def _worth_showing(self) -> bool:
        """Return whether any rank has trained; other functions are shown once they take their time."""
        trained = any(one.get("samples") or one.get("step") for one in self._ranks.values())
        return trained or time.monotonic() - self._began >= _IDLE_S

    def _title(self) -> str:
        return f"{self._name} on {self._where}"

    def _renew(self) -> None:
        if self._table is not None:
            self._table.show(self._title(), self._ranks, f"lagom: {self._text(_WIDTH * 4)}")
        elif self._open:
            return  # a line of progress would go into the program's own line, such as a bar
        elif not self._live:
            sys.stderr.write(f"lagom: {self._text(_WIDTH * 4)}\n")
        else:
            self._clear()
            self._line = f"lagom: {self._text(terminal_columns() - len('lagom: ') - 1)}"
            sys.stderr.write(self._line)
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._line:
            blank = min(len(self._line), terminal_columns() - 1)  # the terminal may have become narrower
            sys.stderr.write("\r" + " " * blank + "\r")
            sys.stderr.flush()
            self._line = ""

    def _text(self, width: int, ended: str = "") -> str:
        """Return the first ranks and the one that is farthest behind, as many as there is room for."""
        last = min(self._ranks, key=lambda rank: (self._ranks[rank].get("samples", 0), rank))
        text = ""
        for number in range(_SHOWN, -1, -1):
            first = sorted(self._ranks)[:number]
            shown = [self._rank_text(rank) for rank in first + [last] * (last not in first)]
            more = len(self._ranks) - len(shown)
            rest = f" | and {more} more rank{'s' * (more != 1)}" if more else ""
            text = " | ".join(shown) + rest + (f", {ended}" if ended else left(self._ranks))
            if len(text) <= width:
                break
        return text[:width]

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
        self._clear()
        sys.stderr.write("\n" * self._open + text + "\n")
        self._open = False
        sys.stderr.flush()
        if self._also is not None:
            self._also(text)


def terminal_columns() -> int:
    """Return the width of the terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _WIDTH
    except (OSError, ValueError, AttributeError):  # no terminal, or an object in its place
        return _WIDTH


def _spans(ranks: list[int]) -> str:
    """ "rank 0", "ranks 0-3", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
