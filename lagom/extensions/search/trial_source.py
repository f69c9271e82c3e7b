"""``TrialSource``: the object that a search asks for trials, and tells how they ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lagom.program.signature import Call

State = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """Describes a trial that is about to run: its hyperparameters, and the function that makes its call."""

    number: int
    params: Mapping[str, Any]
    """Hyperparameters, or component and seed of an ablation study; for displays, records and MLflow."""
    change: Callable[[Call], Call]
    """Makes the trial's call from the call that all trials share; pickled for the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOutcome:
    """Metric or error with which a trial ended, with its time, slot and folder."""

    state: State
    value: float | None = None
    """The metric, combined over the ranks; the last reported value of a pruned trial; None for a failed trial. NaN as
    the metric is a failure, as in Optuna."""
    returned: Any = None
    """Value that the function returned, in types of JSON, and shortened if it is large."""
    error: str = ""
    """Type and message of the exception of a failed trial."""
    traceback: str = ""
    seconds: float = 0.0
    started: float | None = None
    """Time at which a slot got the trial, in seconds since the epoch."""
    prepare_s: float = 0.0
    """Seconds between that time and the trial's own begin, in which the slot prepared it."""
    slot: int = 0
    folder: Path | None = None
    """The trial's own folder, with its output and the files that it wrote."""


class TrialSource(Protocol):
    """Chooses the trials, possibly by outcomes of earlier ones. The search calls it from one thread."""

    @property
    def finished(self) -> bool:
        """Return whether ``ask`` will give no more trials, however the running ones end."""

    def ask(self) -> TrialSpec | None:
        """Return the next trial; None if finished, or if the next trial depends on trials that still run."""

    def report(self, number: int, step: int, value: float) -> bool:
        """Note the ``value`` that the trial ``number`` reports; return whether the trial is to be pruned."""

    def tell(self, number: int, outcome: TrialOutcome) -> None:
        """Note how the trial ``number`` ended."""


class KeptTrialSource(TrialSource, Protocol):
    """A source that keeps its trials, and may go on from those of an earlier search."""

    def trials(self) -> list[dict[str, Any]]:
        """Return one dict for each trial that has ended, in the order of their numbers."""

    @property
    def kept_trial(self) -> int | None:
        """Return the number of the trial whose files are put in their places at the end; None if there is none."""

    def close(self) -> None:
        """Close the journal; the trials can still be read, and ``ask`` gives no more."""
