"""``TrialLoop``: hands trials to the slots of a cluster, so that each is busy all the time."""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lagom.driver.aggregate import aggregate, remedy
from lagom.driver.failure import raise_failure
from lagom.driver.protocol import Outcome
from lagom.errors import AblationError, LagomError
from lagom.extensions.search.mlflow_trials import MlflowTrials
from lagom.extensions.search.on_rank.messages import (
    OutcomePart,
    RunTrial,
    SlotJoin,
    TrialAnswer,
    TrialEnded,
    TrialReport,
    TrialValue,
)
from lagom.extensions.search.search_progress import SearchProgress
from lagom.extensions.search.slots.trial_slots import TrialSlots
from lagom.extensions.search.trial_files import OUTPUT, PACKED, last_lines, unpack_files
from lagom.extensions.search.trial_source import TrialOutcome, TrialSource, TrialSpec
from lagom.plan import Plan
from lagom.program.payload import Parcel, unpack
from lagom.watch.json_values import as_json
from lagom.watch.messages import Picture
from lagom.wire.messages import Closed, LocalEvent, Log, Lost, Message, ProgressReport, Stalled

log = logging.getLogger("lagom")
_TICK_S = 0.5
_JOIN_S = 2.0
"""Longest time that the first slot waits for the others: from the start, trials are to share their host's cores."""
_BAD_METRIC = "MetricError"
_OF_THE_VARIANT = AblationError.__name__
"""Name of the error of one variant."""
_NO_NUMBER = "ValueError: the metric is"
"""Begin of the error of a trial that has diverged."""


@dataclass(slots=True)
class _Slot:
    """Tracks a slot that has joined: the trial that it runs, and the parts of the outcome that have arrived."""

    join: SlotJoin
    running: TrialSpec | None = None
    parts: list[bytes] = field(default_factory=list)
    pruned: bool = False
    last_value: float | None = None
    why_lost: str = ""
    """The error with which the slot's process ended, if it could send one."""
    began: float = 0.0
    """Time at which the slot got the trial, in seconds since the epoch."""


class TrialLoop:
    """Hands trials to free slots, and passes their reports and outcomes to the source."""

    def __init__(
        self,
        source: TrialSource,
        plan: Plan,
        metric: str,
        max_failed: int | None,
        trials_dir: Path,
        progress: SearchProgress | None = None,
        mlflow: MlflowTrials | None = None,
        num_slots: int = 1,
    ) -> None:
        """Prepare to run the trials of ``source``, each by ``plan``.

        Args:
            metric: name of the metric in a trial's result.
            max_failed: number of failed trials in a row that ends the search; None for no limit.
            trials_dir: folder in which each trial has a folder of its own.
            progress: shows the search; None shows nothing.
            mlflow: makes an MLflow run for each trial; None makes none.
            num_slots: number of slots that will join.
        """
        self._source = source
        self._plan = plan
        self._metric = metric
        self._max_failed = max_failed if max_failed is not None else sys.maxsize
        self._trials_dir = trials_dir
        self._progress = progress
        self._mlflow = mlflow
        self._num_slots = num_slots
        self.began_at = math.inf
        """Monotonic time at which the first trial went to a slot; infinite before."""
        self._begin_by = 0.0
        """Time at which trials begin even if slots are missing, once a slot has joined."""
        self._joined: dict[int, _Slot] = {}
        self._again: list[TrialSpec] = []
        self._num_lost: dict[int, int] = {}
        self._num_failed = 0
        self._has_completed = False
        self._differs = False
        """Whether the ranks of a trial had different metrics."""

    def run(self, slots: TrialSlots) -> None:
        """Run trials on ``slots`` until the source has no more, or too many have failed in a row.

        Raises:
            LagomError: if no slot is left, or the last of ``max_failed`` trials was lost with its processes.
            Exception: the last trial's exception, if ``max_failed`` trials in a row have failed; the exception of the
                first trial without a metric, if no trial before has completed; or an exception of ``source.ask``.
        """
        self._slots = slots
        while True:
            self._fill()
            if self._source.finished and not self._again and not self._is_running():
                return
            slots.serve(self._take, _TICK_S)

    def _fill(self) -> None:
        """Start a trial on each free slot: one that a lost slot has left, or the source's next one.

        Release free slots for which no trial is left.
        """
        if not self._joined or not self._may_begin():
            return
        for number, slot in list(self._joined.items()):
            if slot.running is not None:
                continue
            spec = self._again.pop(0) if self._again else self._source.ask()
            if spec is not None:
                self._start(number, slot, spec)
            elif not self._source.finished:
                return  # the next trial depends on those that run
            elif self._is_running() and self._slots.release(number):
                del self._joined[number]

    def _may_begin(self) -> bool:
        now = time.monotonic()
        self._begin_by = self._begin_by or now + _JOIN_S
        return len(self._joined) >= self._num_slots or now >= min(self._begin_by, self.began_at)

    def _start(self, number: int, slot: _Slot, spec: TrialSpec) -> None:
        slot.running, slot.parts, slot.pruned, slot.last_value, slot.began = spec, [], False, None, time.time()
        self.began_at = min(self.began_at, time.monotonic())
        folder = self.folder_of(spec.number)
        shutil.rmtree(folder, ignore_errors=True)  # no files and output of an earlier, lost attempt
        folder.mkdir(parents=True)
        here = [other for other in self._joined.values() if other.join.host == slot.join.host]
        local = self._plan.launcher == "local"  # then all slots are here, also those that join again
        num_here = max(len(here), self._num_slots if local else 1)
        alone = num_here == 1 and self._plan.world_size == 1 and local
        threads = 0 if alone else max(1, slot.join.cores // (num_here * self._plan.world_size))
        message = RunTrial(
            number=spec.number,
            change=base64.b64encode(Parcel(spec.change).tobytes()).decode(),
            metric=self._metric,
            threads=threads,
            gpus=slot.join.gpus,
            folder=str(folder) if slot.join.sees_driver else "",
            env=dict(self._mlflow.begin(spec, slot.join.sees_driver)) if self._mlflow is not None else {},
        )
        self._slots.send(number, message)
        if self._progress is not None:
            self._progress.began(number, spec.number, spec.params)

    def folder_of(self, number: int) -> Path:
        """Return the folder of trial ``number``, inside the folder of all trials."""
        return self._trials_dir / f"{number:04d}"

    def _is_running(self) -> bool:
        return any(slot.running is not None for slot in self._joined.values())

    def _take(self, number: int, message: Message | LocalEvent) -> None:
        if isinstance(message, SlotJoin):
            self._joined[number] = _Slot(message)
        slot = self._joined.get(number)
        if slot is None:
            return
        self._show(number, message)
        match message:
            case TrialValue():
                self._answer(number, slot, message)
            case OutcomePart(name="outcome"):
                slot.parts.append(base64.b64decode(message.data))
            case OutcomePart():
                self._append(slot, PACKED, base64.b64decode(message.data))
            case Log():
                self._append(slot, OUTPUT, message.data.encode("latin-1"))
            case Picture():
                self._keep_picture(slot, message)
            case TrialEnded():
                self._end(number, slot, message)
            case Lost():
                slot.why_lost = message.message
            case Closed():
                del self._joined[number]
                if slot.running is not None:
                    self._lose(number, slot.running, slot.why_lost)

    def _show(self, number: int, message: Message | LocalEvent) -> None:
        """Show a message of slot ``number``."""
        if (progress := self._progress) is None:
            return
        match message:
            case SlotJoin():
                progress.joined(number, message.host_name)
            case TrialValue():
                progress.reported(number, message.step, message.value)
            case ProgressReport():
                progress.reported(number, message.step)
            case Log():
                progress.wrote(number, message.data.encode("latin-1"))
            case Stalled():
                progress.stalled(number, message)
            case TrialEnded() | Closed():
                progress.idle(number)

    def _append(self, slot: _Slot, name: str, data: bytes) -> None:
        if slot.running is not None:
            with open(self.folder_of(slot.running.number) / name, "ab") as file:
                file.write(data)

    def _keep_picture(self, slot: _Slot, message: Picture) -> None:
        if slot.running is not None:
            folder = self.folder_of(slot.running.number)
            picture = folder / f"picture-{len(list(folder.glob('picture-*.png'))) + 1}.png"
            picture.write_bytes(base64.b64decode(message.png))

    def _answer(self, number: int, slot: _Slot, message: TrialValue) -> None:
        assert slot.running is not None
        slot.last_value = message.value
        slot.pruned |= bool(self._source.report(slot.running.number, message.step, message.value))
        self._slots.send(number, TrialAnswer(prune=slot.pruned))

    def _lose(self, number: int, spec: TrialSpec, why: str) -> None:
        """Queue the trial of a lost slot for any slot; after too many losses, count it as failed.

        Raises:
            LagomError: if too many trials have failed in a row.
        """
        lost = self._num_lost[spec.number] = self._num_lost.get(spec.number, 0) + 1
        if lost <= self._plan.config.max_failures:
            self._again.append(spec)
            return
        error = f"RankError: the processes that ran this trial were lost {lost} times" + (f": {why}" if why else "")
        self._fail(spec, error, slot=number, folder=self.folder_of(spec.number))

    def _fail(self, spec: TrialSpec, error: str, **facts: Any) -> None:
        """Count a trial as failed that has raised no exception.

        Raises:
            LagomError: if too many trials have failed in a row.
        """
        self._tell(spec, TrialOutcome(state="failed", error=error, **facts))
        if self._num_failed >= self._max_failed:
            many = f"{self._num_failed} trials failed one after another" if self._num_failed > 1 else "a trial failed"
            raise LagomError(f"{many}, the last with {dict(spec.params)}: {error} ({self.folder_of(spec.number)})")

    def _end(self, number: int, slot: _Slot, message: TrialEnded) -> None:
        spec, slot.running = slot.running, None
        assert spec is not None
        reports = message.reports
        for problem in message.problems:
            log.warning(problem)
        facts: dict[str, Any] = {"seconds": message.seconds, "started": slot.began, "slot": number}
        facts["prepare_s"] = round(max(0.0, time.time() - slot.began - message.seconds), 3)
        facts["folder"] = self.folder_of(spec.number)
        unpack_files(self.folder_of(spec.number))
        loaded = _Loaded(b"".join(slot.parts))
        failed = [report for report in reports if report.has_failed]
        if slot.pruned:  # a rank that reports nothing is not told to end, and fails because the others have ended
            failed = [report for report in failed if not report.consequence]
        if slot.pruned and not failed:
            self._tell(spec, TrialOutcome(state="pruned", value=slot.last_value, **facts))
        elif failed or not all(report.ok for report in reports):
            first = min(failed or reports, key=lambda report: report.consequence)
            error = f"{first.error or 'RankError'}: {first.message if first.error else 'was stopped'}"
            self._tell(spec, TrialOutcome(state="failed", error=error, traceback=first.traceback, **facts))
            is_mistake = first.error == _BAD_METRIC and not self._has_completed
            if is_mistake or self._num_failed >= self._max_failed:
                outcome = Outcome(rank=first.rank, report=first, load=loaded.value)
                self._give_up(spec, outcome)
        else:
            of_trial = [report for report in reports if isinstance(report, TrialReport)]
            told = [(one.metric, one.samples) for one in of_trial if one.metric is not None]  # rank 0's, at least
            value = self._metric_of(spec, [metric for metric, _ in told], [samples for _, samples in told])
            facts["returned"] = as_json(loaded.value().get("value"))
            if math.isnan(value):  # a failure, as in Optuna
                self._tell(spec, TrialOutcome(state="failed", error=f"{_NO_NUMBER} {value}; want a number", **facts))
            else:
                self._tell(spec, TrialOutcome(state="complete", value=value, **facts))

    def _metric_of(self, spec: TrialSpec, metrics: Sequence[float], samples: Sequence[int]) -> float:
        """Combine the metrics of a trial's ranks; if they differ, warn once in a search."""

        def warn(text: str) -> None:
            if not self._differs:
                log.warning("trial %d: %s", spec.number, text)
            self._differs = True

        advice = remedy(self._plan.config.batches, self._plan.config.evaluation)
        return float(aggregate(metrics, samples, "" if self._plan.already_distributed else advice, warn))

    def _tell(self, spec: TrialSpec, outcome: TrialOutcome) -> None:
        # Both say nothing about other trials: they neither count as failures in a row nor end a row of failures.
        if not outcome.error.startswith((_OF_THE_VARIANT, _NO_NUMBER)):
            self._num_failed = self._num_failed + 1 if outcome.state == "failed" else 0
        self._has_completed |= outcome.state == "complete"
        self._source.tell(spec.number, outcome)
        if self._mlflow is not None:
            self._mlflow.end(spec, outcome)
        if self._progress is not None:
            self._progress.ended(spec, outcome)

    def _give_up(self, spec: TrialSpec, outcome: Outcome) -> None:
        """Raise the exception of a failed trial, to end the search: other trials would probably fail as well."""
        try:
            raise_failure([outcome])
        except Exception as error:
            if self._num_failed >= self._max_failed:
                many = f"{self._num_failed} trials failed one after another" if self._num_failed > 1 else "it failed"
                folder = self.folder_of(spec.number)
                said = f"\n{last_lines(folder).rstrip()}" if outcome.report.exited else ""
                note = f"lagom: {many}, the last with {dict(spec.params)}: {folder}{said}"
                if hasattr(error, "add_note"):
                    error.add_note(note)
                else:  # Python 3.10
                    log.error("%s", note)
            raise


class _Loaded:
    """The outcome of a trial: the value that its function returned, or its exception."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def value(self) -> Mapping[str, Any]:
        """Unpickle the outcome; empty if it was not sent (too large, or no pickle), or cannot be unpickled here."""
        with contextlib.suppress(Exception):  # a class of the program's may raise anything when unpickled
            found: Mapping[str, Any] = unpack(bytearray(self._data))
            return found
        return {}
