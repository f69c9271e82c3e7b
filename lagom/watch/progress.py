"""``Progress``: shows a run's progress: a line or a table that renews itself, or a line now and then in a log."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from lagom.watch.notebook import notebook
from lagom.watch.notebook_table import NotebookTable, has_loaded, is_starting, left, number_text
from lagom.watch.status_line import WIDTH, StatusLine
from lagom.watch.stragglers import straggler
from lagom.wire.messages import ProgressReport, Stalled, TaskJoined

_IDLE_S = 2.0
SLOW_START_S = 60.0
"""Wait for the first task after which it may be that tasks run and cannot reach this process."""
_SHOWN = 4  # ranks
_WAITS = 0.1  # share of its time that a rank may wait for data without mention


class Progress:
    """Shows a run's progress on standard error, or in a table in a notebook."""

    def __init__(
        self, plan: Any, where: str, also: Callable[[str], None] | None = None, every_s: float | None = None
    ) -> None:
        """Show ``plan``'s run; ``also`` receives messages that are shown once, such as which rank waits for which.

        Renew the line after ``every_s`` seconds; by default sooner in a terminal than in a log.
        """
        self._name = plan.name
        self._world_size = plan.world_size
        self._where = where
        self._is_here = plan.launcher == "local" or where.startswith("Spark local[")
        self._stalled: dict[int, Stalled] = {}
        """Reports of ranks that make no progress, by rank."""
        self._ranks: dict[int, ProgressReport] = {}
        self._hosts: dict[str, list[int]] = {}
        self._cores: dict[str, int] = {}
        """Cores of each host, where they are known."""
        self._said_waiting = False
        self._said_unreachable = False
        display = notebook()
        self._table = (
            NotebookTable(display, max if plan.config.batches == "whole" else sum) if display is not None else None
        )
        self.line = StatusLine(also, every_s, elsewhere=self._table is not None)
        self._began = time.monotonic()

    def joined(self, task: TaskJoined) -> None:
        """Store where the ranks of a task are; tell where all ranks are once all have joined."""
        self._hosts.setdefault(task.host, []).extend(task.ranks)
        if task.cores:
            self._cores[task.host] = task.cores
        if sum(map(len, self._hosts.values())) == self._world_size:
            self._say_topology()

    def update(self, report: ProgressReport) -> None:
        """Store a rank's heartbeat, and renew the display if that is due."""
        before = self._ranks.get(report.rank)
        if before is None or (report.samples, report.step) != (before.samples, before.step):
            self._stalled.pop(report.rank, None)
        if report.loss is None and before is not None:
            # A loss can be read only as long as the program keeps it.
            report = dataclasses.replace(report, loss=before.loss)
        self._ranks[report.rank] = report
        if self._worth_showing() and self.line.is_due():
            self._renew()

    def waiting(self, joined: int, wanted: int) -> None:
        """Tell once that only ``joined`` of ``wanted`` tasks have started; after a minute also what may be wrong."""
        waited_s = time.monotonic() - self._began
        if joined < wanted and not self._said_waiting:
            self._said_waiting = True
            self._say_waiting(f"waiting for {self._where} to start the tasks ({joined} of {wanted} are here)")
        elif not joined and not self._is_here and not self._said_unreachable and waited_s >= SLOW_START_S:
            self._said_unreachable = True
            self._say_waiting(
                f"no task is here after {waited_s:.0f} s: they wait for free slots, or start slowly; if they run, they "
                "cannot reach this process, and their output comes at the end. Spark's pages show whether they run, "
                "and lagom doctor whether they can reach it"
            )

    def _say_waiting(self, text: str) -> None:
        if self._table is None:
            self.line.say(f"lagom: {self._name}: {text}")
        else:
            self._table.wait(self._name, text)

    def show_notice(self, text: str) -> None:
        """Show a message in which nothing is wrong; in a notebook not on standard error, which looks like an error."""
        if self._table is not None:
            self._table.show_notice(text)
        self.line.say_outside_notebook(text)

    def warn(self, text: str) -> None:
        """Show ``text``, with all lines after the first indented."""
        first, *more = text.splitlines()
        self.line.say("\n".join([f"lagom: {self._name}: {first}", *(f"    {line}" for line in more)]))

    def stalled(self, reports: Mapping[int, Stalled], text: str) -> None:
        """Show the report ``text`` about ranks that make no progress, and mark these in the table."""
        self._stalled |= {rank: one for rank, one in reports.items() if not one.work.waits}
        if self._table is not None and self._ranks:
            self._renew()
        self.warn(text)

    def picture(self, png: str, path: os.PathLike[str] | None) -> None:
        """Show the program's picture, given as base64, in a notebook; elsewhere tell where it is kept."""
        display = notebook()
        kept = f"it is in {path}" if path is not None else "it is not kept, since run_dir is None"
        if display is not None:
            display.display({"image/png": png, "text/plain": f"a picture of rank 0; {kept}"}, raw=True)
        else:
            self.warn(f"rank 0 showed a picture; {kept}")

    def unheard(self) -> None:
        """Print that executors cannot reach the driver, so that rank 0's output appears only at the end of the run."""
        self.line.say(
            f"lagom: {self._name}: the executors of {self._where} cannot reach this process: "
            "no live output or progress; what rank 0 prints is shown at the end"
        )

    def close(self, ended: str = "") -> None:
        """Show the last state, which stays; ``ended`` is the outcome of the run."""
        if self._table is not None and self._ranks and self._worth_showing():
            text = f"lagom: {self._title()}: {self._text(WIDTH * 4, ended)}"
            self._table.show(self._title(), self._rows(), text, ended, self._stalled)
        elif self._table is not None and self._said_waiting:
            self._table.wait(self._title(), ended or "done")
        self.line.close()

    def _say_topology(self) -> None:
        """Say where the ranks are, and where they are more than cores; in a notebook, the title of the table does."""
        crowded = "".join(f"; {text}" for text in self._crowded())
        self.line.say_outside_notebook(f"lagom: {self._name}: {self._topology()}{crowded}")
        if crowded and self._table is not None:
            self._table.show_notice(f"lagom: {self._name}{crowded}")

    def _crowded(self) -> list[str]:
        """Return a text if a host has more ranks than cores; about the first of such hosts."""
        for host, ranks in sorted(self._hosts.items()):
            cores = self._cores.get(host, len(ranks))
            if len(ranks) > cores:
                named = f"{cores} core{'s' * (cores != 1)}"
                return [
                    f"{len(ranks)} ranks on {named} of {host} are slower than {cores}: take fewer (world_size=, -n)"
                ]
        return []

    def _topology(self) -> str:
        ranks = "1 rank" if self._world_size == 1 else f"{self._world_size} ranks"
        hosts = ", ".join(f"{host}: {_spans(sorted(ranks))}" for host, ranks in sorted(self._hosts.items()))
        return f"{ranks} on {self._where} ({hosts})"

    def _worth_showing(self) -> bool:
        """Return whether any rank has trained; without training, return True once the run has taken a while."""
        trained = any(one.samples or one.step for one in self._ranks.values())
        return trained or time.monotonic() - self._began >= _IDLE_S

    def _title(self) -> str:
        """Return the function's name and where the ranks are, as far as they have joined."""
        is_complete = sum(map(len, self._hosts.values())) == self._world_size
        return f"{self._name}: {self._topology()}" if is_complete else f"{self._name} on {self._where}"

    def _rows(self) -> dict[int, ProgressReport | None]:
        """Return the last heartbeat of each rank; None for a rank that has joined and sent none."""
        return {**dict.fromkeys(itertools.chain.from_iterable(self._hosts.values())), **self._ranks}

    def _renew(self) -> None:
        if self._table is not None:
            text = f"lagom: {self._title()}: {self._text(WIDTH * 4)}"
            self._table.show(self._title(), self._rows(), text, stalled=self._stalled)
        else:
            self.line.renew(self._text)

    def _text(self, width: int, ended: str = "") -> str:
        """Return a line with the first ranks that ``width`` has room for, and the rank that is farthest behind."""
        last = min(self._ranks, key=lambda rank: (self._ranks[rank].samples, rank))
        text = ""
        for number in range(_SHOWN, -1, -1):
            first = sorted(self._ranks)[:number]
            shown = [self._rank_text(rank) for rank in first + [last] * (last not in first)]
            more = len(self._ranks) - len(shown)
            rest = f" | and {more} more rank{'s' * (more != 1)}" if more else ""
            text = " | ".join(shown) + rest + (f", {ended}" if ended else "" if self._stalled else left(self._ranks))
            if len(text) <= width:
                break
        return text[:width]

    def _rank_text(self, rank: int) -> str:
        event = self._ranks[rank]
        parts = ["starting" if is_starting(event) else "running"]
        if has_loaded(event):
            step = f"step {event.step}" + (f"/{event.steps}" if event.steps else "")
            parts = [f"epoch {event.epoch}", step, f"{event.samples:,} samples"]
        if event.rate:
            parts.append(f"{event.rate:,.0f}/s")
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4g}")
        parts += [f"{name} {number_text(value)}" for name, value in event.values.items()]
        if event.data >= _WAITS:
            parts.append(f"waits {event.data:.0%} of its time for data")
        if (late := straggler(self._ranks)) is not None and late[0] == rank:
            parts.append(f"the others wait for it {late[1]:.0%} of their time")
        if event.memory:
            parts.append(f"{event.memory / 1e9:.1f} GB")
        return f"rank {rank}: {', '.join(parts)}"


def _spans(ranks: list[int]) -> str:
    """Return "rank 0", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
