"""``AblationTrials``: the trials of an ablation study: the base and each variant, with each seed."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagom.config.trials import JOURNAL
from lagom.errors import AblationError, LagomError
from lagom.extensions.search.effects import Effect, effect, is_seed_ignored
from lagom.extensions.search.on_rank.ablation_change import AblationChange
from lagom.extensions.search.trial_journal import TrialJournal
from lagom.extensions.search.trial_source import TrialOutcome, TrialSpec
from lagom.extensions.search.variants import Variant


@dataclass(frozen=True, slots=True)
class _Repetition:
    """A variant with one of the seeds."""

    variant: Variant
    seed: int | None

    @property
    def params(self) -> dict[str, Any]:
        """Return the values that identify the trial in displays and in the journal."""
        return {"without": "" if self.variant.component is None else self.variant.name, "seed": self.seed}


class AblationTrials:
    """Source of an ablation study's trials: the base with each seed, then each variant with each seed.

    Trials that have ended are kept in a journal in ``folder``, from which another study can go on; that study runs
    failed trials again.

    Args:
        variants: the base, then the variants that are compared with it.
        seeds: seed of each repetition; None: the random states of the calling process.
        folder: folder of the journal; None keeps the trials in memory.
        end: time (of ``time.monotonic``) after which no more trials begin.

    Raises:
        LagomError: if the journal is another study's, or another process has it open.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        seeds: Sequence[int | None],
        folder: Path | None = None,
        end: float = math.inf,
    ) -> None:
        self._variants = list(variants)
        self._folder = folder
        self._end = end
        order = [_Repetition(variant, seed) for variant in self._variants for seed in seeds]
        self._all = dict(enumerate(order))
        self._journal = TrialJournal(folder / JOURNAL) if folder is not None else None
        self._rows: dict[int, dict[str, Any]] = {}
        if self._journal is not None:
            try:
                self._resume(self._journal)
            except BaseException:
                self._journal.close()
                raise
        done = {number for number, row in self._rows.items() if row["state"] == "complete"}
        self._waiting = deque(number for number in self._all if number not in done)

    @property
    def finished(self) -> bool:
        """Return whether ``ask`` has no more trials: all were asked for, or the time is over."""
        return not self._waiting or time.monotonic() >= self._end

    def ask(self) -> TrialSpec | None:
        """Return the next trial, or None if there are no more."""
        if self.finished:
            return None
        number = self._waiting.popleft()
        one = self._all[number]
        change = AblationChange(one.variant.component, one.variant.layers, one.seed)
        return TrialSpec(number=number, params=one.params, change=change)

    def report(self, number: int, step: int, value: float) -> bool:
        """Return False: every trial runs to its end, since a study compares final metrics."""
        return False

    def tell(self, number: int, outcome: TrialOutcome) -> None:
        """Note how the trial ``number`` ended."""
        folder = outcome.folder if self._folder is not None else None  # else the folder is a temporary one
        if folder is not None and self._folder is not None and folder.is_relative_to(self._folder):
            folder = folder.relative_to(self._folder)
        row = {
            "number": number,
            "params": self._all[number].params,
            "value": outcome.value,
            "state": outcome.state,
            "seconds": outcome.seconds,
            "started": outcome.started,
            "prepare_s": outcome.prepare_s,
            "slot": outcome.slot,
            "error": outcome.error,
            "traceback": outcome.traceback,
            "folder": None if folder is None else str(folder),
            "returned": outcome.returned,
        }
        self._rows[number] = row
        if outcome.error.startswith(AblationError.__name__):  # the variant fails with every seed: skip the other seeds
            variant = self._all[number].variant
            self._waiting = deque(other for other in self._waiting if self._all[other].variant != variant)
        if self._journal is not None:
            self._journal.append_logs([row])

    def trials(self) -> list[dict[str, Any]]:
        """Return one dict for each trial that has ended, in the order of their numbers; see ``SearchResult.trials``."""
        return [self._located(self._rows[number]) for number in sorted(self._rows)]

    def effects(self) -> list[Effect]:
        """Return the change of the metric without each component, by the trials that have ended."""
        base = self._values(self._variants[0])
        return [effect(variant.name, base, self._values(variant)) for variant in self._variants[1:]]

    @property
    def kept_trial(self) -> int | None:
        """Return the number of the base's first trial, 0; None if that trial did not run to its end."""
        return 0 if self._rows.get(0, {}).get("state") == "complete" else None

    @property
    def base_value(self) -> float | None:
        """Return the mean metric of the base; None if none of its trials ran to its end."""
        values = self._values(self._variants[0])
        return statistics.fmean(values.values()) if values else None

    def is_seed_ignored(self) -> bool:
        """Return whether the seeds make no difference to the metrics; see ``is_seed_ignored`` in effects.py."""
        return is_seed_ignored([self._values(variant) for variant in self._variants])

    def close(self) -> None:
        """Close the journal; the trials can still be read, and ``ask`` gives no more."""
        self._waiting.clear()
        if self._journal is not None:
            self._journal.close()

    def _values(self, variant: Variant) -> dict[int, float]:
        """Return the metrics of the trials of ``variant`` that ran to their end, by place of the seed."""
        own = [number for number, one in self._all.items() if one.variant == variant]
        rows = {place: self._rows.get(number) for place, number in enumerate(own)}
        return {place: float(row["value"]) for place, row in rows.items() if row and row["state"] == "complete"}

    def _located(self, row: Mapping[str, Any]) -> dict[str, Any]:
        folder = None if row["folder"] is None else (self._folder or Path()) / row["folder"]
        return {**row, "folder": folder}

    def _resume(self, journal: TrialJournal) -> None:
        for row in journal.read_logs(0):
            known = self._all.get(row.get("number", -1))
            if known is None or known.params != row.get("params"):
                raise LagomError(
                    f"the search to resume had a trial with {row.get('params')}, and this study does not; resume with "
                    "the same components and seeds"
                )
            self._rows[row["number"]] = dict(row)
