"""``DriverRun``: one run as the driver sees it, from the plan to the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lagom.driver.aggregate import aggregate, remedy
from lagom.driver.attempts import run_attempts
from lagom.driver.failure import add_advice
from lagom.driver.protocol import Launcher
from lagom.driver.termination import Termination
from lagom.extensions.registry import wanted
from lagom.plan import Plan
from lagom.program.failure_advice import advice
from lagom.program.own_frames import cut_own_frames
from lagom.program.signature import Call
from lagom.random_states import set_random_states
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.result import Result
from lagom.speed import Speed
from lagom.timings import Timings
from lagom.watch.notebook import notebook
from lagom.watch.notebook_table import NotebookTable
from lagom.watch.run_dir import RunRecords

if TYPE_CHECKING:
    from lagom.whole_modules import WholeModule

_MAX_NAMES = 6


@dataclass(kw_only=True)
class DriverRun:
    """One run: the facts before its ranks start, and what extensions add to them."""

    launcher: Launcher
    plan: Plan
    call: Call
    timings: Timings
    source: str | None
    """File that defines the function; None if there is none, as in a notebook."""
    records: RunRecords | None = None
    """Records of the run; None if it keeps none, and until ``run``."""
    snapshots: SnapshotFolder | None = None
    """Folder of the run's snapshots, from which an attempt continues; None without snapshots."""
    whole: list[WholeModule] = field(default_factory=list)
    """Modules that ran whole on every rank, once the ranks have returned."""
    speed: Speed | None = None
    """Speed of the training steps, once the ranks have returned."""
    termination: Termination = field(default_factory=Termination)
    """Tells of SIGTERM to this process."""
    returned: list[Callable[[Any, list[Any]], None]] = field(default_factory=list)
    """Functions that are called with the value of the run and those of all ranks, when the ranks have returned."""

    def check(self) -> None:
        """Let extensions check the run before anything of it is recorded."""
        for extension in wanted(self.plan):
            extension.check_run(self)

    def run(self, records: RunRecords | None) -> Result:
        """Run the ranks, and again after losses; return the result, and record how the run ended.

        Raises:
            Exception: as ``lagom``.
        """
        self.records = records
        with ExitStack() as stack:
            for extension in wanted(self.plan):
                stack.enter_context(extension.driver(self))
            return self._run()

    def _run(self) -> Result:
        timings, records = self.timings, self.records
        timings.end("prepare")
        outcomes, failures = run_attempts(
            self.launcher, self.plan, self.call, records, self.snapshots, timings, self.termination
        )
        returned = [outcome.load() for outcome in outcomes]
        value, values = self._values(returned)
        for part, seconds in returned[0].get("timings", {}).items():
            timings.end(part, seconds)
        timings.end("collect")
        self.whole = returned[0].get("whole", [])
        self.speed = returned[0].get("speed") or Speed(world_size=len(returned))
        for function in self.returned:
            function(value, values)
        if changed := returned[0].get("changed"):
            self._say_changed(changed)
        if self.speed.is_worth_saying and self.plan.rehearsal is None:
            self._say(self.speed.line(), is_notice=True)
        if records is not None:
            ended = {"outcome": "returned", "value": value, "per_rank": values}
            records.note("whole", [module.as_json() for module in self.whole])
            records.note("speed", self.speed.as_json())
            if (devices := returned[0].get("devices")) is not None:
                records.note("devices", devices)
            records.ended(ended, timings.seconds(), timings.parts())
        return Result(
            value,
            values,
            seconds=timings.seconds(),
            timings=timings.parts(),
            whole=self.whole,
            speed=self.speed,
            name=self.plan.name,
            where=self.launcher.where(),
            run_dir=records.folder if records is not None else None,
            upload=records.upload if records is not None else None,
            failures=failures,
            module=self.call.provided.get("module"),
        )

    def _values(self, returned: Sequence[Mapping[str, Any]]) -> tuple[Any, list[Any]]:
        """Return the run's value and all ranks' values; set this process's generators to rank 0's final states."""
        values = [one["value"] for one in returned]
        config = self.plan.config
        text = "" if self.plan.already_distributed else remedy(config.batches, config.evaluation)
        value = aggregate(values, [one["samples"] for one in returned], f"{text}result.per_rank has all of them")
        if (states := returned[0].get("random")) is not None:
            set_random_states(states)
        return value, values

    def _say_changed(self, names: Sequence[str]) -> None:
        """Say which of the caller's objects the function has changed on the ranks, and that they are as before here."""
        shown = [*names[:_MAX_NAMES], *([f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else [])]
        what = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
        yours = "yours are as before: return them" if len(names) > 1 else "yours is as before: return it"
        self._say(f"changed {what} on the ranks; {yours}")

    def _say(self, text: str, *, is_notice: bool = False) -> None:
        """Show and record a line below the others; a notebook shows a notice in a frame and not as an error."""
        text = f"lagom: {self.plan.name}: {text}"
        display = notebook() if is_notice else None
        if display is not None:
            NotebookTable(display, max).show_notice(text)
        else:
            sys.stderr.write(f"{text}\n")
        if self.records is not None:
            self.records.said(text)

    def cut_frames(self, error: BaseException) -> None:
        """Remove lagom's frames from a traceback, and add advice to an error of the program in this process.

        After Ctrl-C remove all, unless the program runs in this process: they say how this process waits for the ranks.
        """
        if self.plan.launcher == "inline":  # else the rank has given advice
            text = advice(error, self.plan.packages, already_distributed=self.plan.already_distributed)
            add_advice(error, text)
        if isinstance(error, KeyboardInterrupt) and self.plan.launcher != "inline":
            error.__traceback__ = None
        else:
            cut_own_frames(error)
