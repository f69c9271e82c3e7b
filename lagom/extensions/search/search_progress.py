"""``SearchProgress``: shows a search while it runs, a line in a terminal and a table in a notebook."""

from __future__ import annotations

import html
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lagom.extensions.search.pages.axis import shown
from lagom.extensions.search.pages.live_table import SlotRow, cut, live_table
from lagom.extensions.search.pages.slot_timeline import busy_share
from lagom.extensions.search.trial_source import TrialOutcome, TrialSpec
from lagom.result import lasted
from lagom.watch.notebook import NotebookCell, notebook
from lagom.watch.run_dir import RunRecords
from lagom.watch.stall_texts import stall_text
from lagom.watch.status_line import WIDTH, StatusLine
from lagom.wire.messages import Stalled


@dataclass(slots=True)
class _SlotState:
    """State of one slot, for the display."""

    host: str
    number: int | None = None
    """Number of the trial that the slot runs; None if it is idle."""
    params: Mapping[str, Any] = field(default_factory=dict)
    value: float | None = None
    step: int | None = None
    began: float = 0.0
    """Monotonic time at which the slot got its last trial."""
    has_run: bool = False
    """Whether the slot has had a trial."""
    busy_s: float = 0.0
    """Seconds for which the slot has run trials that are over."""
    unsaid: bytes = b""
    """Beginning of a line of output that has not ended."""


class SearchProgress:
    """Shows the number of trials, the best value, and the trial of each slot."""

    def __init__(
        self,
        name: str,
        where: str,
        num_slots: int,
        direction: str,
        records: RunRecords | None,
        num_trials: int | None = None,
        metric: str = "metric",
    ) -> None:
        """Show the trials on ``num_slots`` slots; ``num_trials`` is the number of all trials, if it is known."""
        display = notebook()
        self._cell = NotebookCell(display) if display is not None else None
        self._line = StatusLine(records.said if records is not None else None, elsewhere=self._cell is not None)
        self._name, self._where, self._direction, self._metric = name, where, direction, metric
        self._slots: dict[int, _SlotState] = {}
        self._num_slots = num_slots
        self._counts: Counter[str] = Counter()
        self._num_trials = num_trials
        self._best: tuple[float, int] | None = None
        self._best_params: Mapping[str, Any] = {}
        self._failure = ""
        self._told_failures: set[str] = set()
        self._began = time.monotonic()
        self._first_began, self._last_ended = 0.0, 0.0
        """Monotonic times at which the first trial began, and at which the last one ended; 0 before that."""
        self.shows_output = False
        """Whether to show what rank 0 of each trial prints, each line after the trial's number."""

    def joined(self, number: int, host: str) -> None:
        """Add slot ``number`` on ``host``; renew the display if that is due, as the next methods do."""
        self._slots[number] = _SlotState(host)
        if len(self._slots) == self._num_slots:
            self._line.say_outside_notebook(f"lagom: {self._name}: {self._slots_and_place()}")
        self.renew()

    def began(self, number: int, trial: int, params: Mapping[str, Any]) -> None:
        """Show that slot ``number`` runs ``trial``."""
        slot, now = self._slots[number], time.monotonic()
        slot.number, slot.params, slot.began, slot.has_run = trial, params, now, True
        self._first_began = self._first_began or now
        slot.value = slot.step = None
        self.renew()

    def reported(self, number: int, step: int | None, value: float | None = None) -> None:
        """Show the step of a ``value`` of the trial of slot ``number``; until there is one, of a heartbeat."""
        slot = self._slots[number]
        if value is not None:
            slot.value, slot.step = value, step
        elif slot.value is None:
            slot.step = step
        self.renew()

    def idle(self, number: int) -> None:
        """Show that the trial of slot ``number`` has ended, or that the slot is lost."""
        slot, now = self._slots[number], time.monotonic()
        if slot.unsaid:
            self._print(slot, b"\n")
        slot.busy_s += now - slot.began if slot.number is not None else 0.0
        slot.number, self._last_ended = None, now
        self.renew()

    def stalled(self, number: int, stalled: Stalled) -> None:
        """Tell that a rank of the trial of slot ``number`` makes no progress."""
        text = stall_text({stalled.rank: stalled}, stalled.rank + 1)
        self.warn(f"trial {self._slots[number].number}: {text}")

    def wrote(self, number: int, data: bytes) -> None:
        """Show output of the trial of slot ``number``, if output is shown."""
        if self.shows_output:
            self._print(self._slots[number], data)
        self.renew()

    def renew(self) -> None:
        """Renew the display if that is due."""
        if self._line.is_due():
            self._renew()

    def ended(self, spec: TrialSpec, outcome: TrialOutcome) -> None:
        """Count the ended trial ``spec`` by its outcome; keep its error, and show the first error of a kind."""
        self._count(spec.number, outcome.state, outcome.value, spec.params)
        if outcome.state == "failed":
            self._failure = f"trial {spec.number} failed: {outcome.error}"
            kind = outcome.error.partition(":")[0]
            if kind not in self._told_failures:  # show only the first failure of a kind; the result has all
                self._told_failures.add(kind)
                self.warn(cut(self._failure, WIDTH))

    def restore(self, trials: Sequence[Mapping[str, Any]]) -> None:
        """Count the ``trials`` of the search that this one goes on from."""
        for trial in trials:
            self._count(trial["number"], trial["state"], trial["value"], trial["params"])

    def _count(self, number: int, state: str, value: float | None, params: Mapping[str, Any]) -> None:
        self._counts[state] += 1
        if state == "complete" and value is not None:
            sign = 1 if self._direction == "max" else -1
            if self._best is None or sign * value > sign * self._best[0]:
                self._best, self._best_params = (value, number), params

    def warn(self, text: str) -> None:
        """Show ``text``, with all lines after the first indented."""
        first, *more = text.splitlines()
        self._line.say("\n".join([f"lagom: {self._name}: {first}", *(f"    {line}" for line in more)]))

    def close(self) -> None:
        """Show the last state."""
        self._renew(ended=True)
        self._line.close()

    def _print(self, slot: _SlotState, data: bytes) -> None:
        *lines, slot.unsaid = (slot.unsaid + data).split(b"\n")
        for line in (each.decode(errors="replace") for each in lines):
            self._line.make_room(sys.stdout, line + "\n")
            print(f"trial {slot.number}: {line}", flush=True)

    def _renew(self, ended: bool = False) -> None:
        if self._cell is not None:
            self._cell.renew(self._page(ended), f"lagom: {self._text(WIDTH * 4, ended)}")
        else:
            self._line.renew(lambda width: self._text(width, ended))

    def _text(self, width: int, ended: bool = False) -> str:
        running = sum(slot.number is not None for slot in self._slots.values())
        num_ended = self._counts.total()
        known = f"{num_ended} of {self._num_trials}" if self._num_trials else str(num_ended)
        parts = [f"{known} trial{'s' * ((self._num_trials or num_ended) != 1)} done"]
        parts += [f"{running} running"] * (not ended)
        parts += [f"{self._counts[state]} {state}" for state in ("pruned", "failed") if self._counts[state]]
        if self._best is not None:
            parts.append(f"best {self._best[0]:.6g} (trial {self._best[1]})")
        busy = self._busy()
        parts.append(f"slots {busy:.0%} busy" if not ended else f"slots {busy:.0%} busy, {self._lasted()}")
        return f"{self._name}: {', '.join(parts)}"[:width]

    def _lasted(self) -> str:
        return lasted(time.monotonic() - self._began)

    def _busy(self) -> float:
        """Return the share of time in which slots had a trial, as the report's chart of slots has it."""
        slots = [slot for slot in self._slots.values() if slot.has_run]
        is_running = any(slot.number is not None for slot in slots)
        now = time.monotonic() if is_running else self._last_ended
        busy = sum(slot.busy_s + (now - slot.began if slot.number is not None else 0.0) for slot in slots)
        return busy_share(busy, len(slots), now - self._first_began)

    def _slots_and_place(self) -> str:
        best = f"the {'smallest' if self._direction == 'min' else 'largest'} {self._metric} is best"
        return f"{self._num_slots} trial{'s' * (self._num_slots != 1)} at a time on {self._where}; {best}"

    def _page(self, ended: bool) -> str:
        title = f"<b>{html.escape(self._name)}</b>: {html.escape(self._slots_and_place())}"
        lines = [self._text(WIDTH * 4, ended).partition(": ")[2]]
        if len(self._slots) < self._num_slots and not ended:
            lines.append(f"{len(self._slots)} of {self._num_slots} slots are ready")
        if self._best is not None and self._best_params:
            lines.append(f"best with {', '.join(f'{name}={shown(one)}' for name, one in self._best_params.items())}")
        now = time.monotonic()
        rows = [
            SlotRow(
                slot=number,
                host=slot.host,
                trial=slot.number,
                params=slot.params if slot.number is not None else {},
                step=slot.step,
                value=slot.value,
                seconds=now - slot.began,
            )
            for number, slot in sorted(self._slots.items())
        ]
        done = self._counts.total() / self._num_trials if self._num_trials else None
        return live_table(title, lines, done, self._failure, rows if not ended else [])
