"""``TrialsConfig``: settings that searches and ablation studies share, for many trials of one function."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from lagom.config.metric_names import is_smaller_better
from lagom.config.torch_distributed import TorchDistributedConfig
from lagom.extensions.registry import EXTENSIONS
from lagom.settings import explain_fields

Direction = Literal["min", "max", "minimize", "maximize"]

JOURNAL = "study.journal"
"""Name of the file with all trials, in the folder of a search."""
_DIRECTIONS = {"min": "min", "minimize": "min", "max": "max", "maximize": "max"}


@explain_fields
@dataclass(frozen=True, kw_only=True, eq=False)
class TrialsConfig(TorchDistributedConfig):
    """Settings of many trials of a training function, several at a time.

    The fields of ``TorchDistributedConfig`` apply to each trial, except ``timeout_s``, ``name``, ``description`` and
    ``run_dir``, which apply to all trials together. ``world_size``, ``verify``, ``timeline``, ``debug`` and
    ``snapshot_every_s`` must keep their default values.
    """

    optimization_key: str = "Metric"
    """Name of the metric, in the dict that the function returns, and among the values that it logs. A function that
    returns a number returns the metric."""
    direction: Direction | None = None
    """Whether the best trial has the largest metric, "max", or the smallest, "min". Optuna's "maximize" and "minimize"
    are the same. None: "min" if ``optimization_key`` is the name of a loss or an error (loss, error, mse, mae, rmse,
    perplexity, ...), else "max"."""
    num_slots: int | None = None
    """Number of trials that run at a time. None: all slots of the cluster, divided by ``ranks_per_trial``."""
    ranks_per_trial: int = 1
    """Number of ranks of each trial."""
    max_failed_trials: int | None = 10
    """Ends the search when this many trials in a row have failed, with the error of the last. None: never."""
    world_size: int | None = None
    """Must be None: ``ranks_per_trial`` and ``num_slots`` replace it."""
    resume: str | os.PathLike[str] | None = None
    """Folder of an earlier search (its ``run_dir``), which continues: its trials count, and those that were running are
    tried again."""
    timeout_s: float | None = None
    """Seconds after which no more trials begin. None: no limit."""
    trial_timeout_s: float | None = None
    """Seconds without progress after which a trial fails with a StallError, as with ``timeout_s`` of a run. None:
    never."""

    def __post_init__(self) -> None:
        if self.world_size is not None:
            raise ValueError(
                f"world_size is {self.world_size}; in a search say ranks_per_trial={self.world_size}, the ranks of "
                "each trial, and num_slots for how many trials run at a time"
            )
        for extension in EXTENSIONS:
            extension.settings.check_trials(self)
        TorchDistributedConfig.__post_init__(self)
        self._check_metric()
        self._check_counts()
        self._check_limit()
        self._check_resume()

    @property
    def reports_pass_losses(self) -> bool:
        """Return whether the mean loss of each pass over a loader stops bad trials, if the program logs no metric."""
        return False

    def of_a_trial(self) -> TorchDistributedConfig:
        """Return the config of one trial: the fields that a run has, with the ranks and time limit of a trial."""
        shared = {each.name: getattr(self, each.name) for each in fields(TorchDistributedConfig)}
        ranks = {"world_size": self.ranks_per_trial, "timeout_s": self.trial_timeout_s}
        return TorchDistributedConfig(**shared | ranks)

    def _check_metric(self) -> None:
        if not isinstance(self.optimization_key, str) or not self.optimization_key:
            raise ValueError(f"optimization_key is {self.optimization_key!r}; want the name of a metric")
        given = self.direction
        if given is None:
            given = "min" if is_smaller_better(self.optimization_key) else "max"
        direction = _DIRECTIONS.get(given.lower()) if isinstance(given, str) else None
        if direction is None:
            raise ValueError(f"direction is {given!r}; want 'max' or 'min', or Optuna's 'maximize' or 'minimize'")
        object.__setattr__(self, "direction", direction)

    def _check_counts(self) -> None:
        check_count("ranks_per_trial", self.ranks_per_trial, 1)
        if self.num_slots is not None:
            check_count("num_slots", self.num_slots, 1, ", or None for all")
        if self.max_failed_trials is not None:
            check_count("max_failed_trials", self.max_failed_trials, 1, ", or None for any number")
        if self.launcher == "inline" and self.ranks_per_trial > 1:
            raise ValueError(
                f"launcher='inline' is one rank in this process, but ranks_per_trial={self.ranks_per_trial}"
            )

    def _check_limit(self) -> None:
        limit = self.trial_timeout_s
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf
        ):
            raise ValueError(f"trial_timeout_s is {limit!r}; want seconds, more than 0, or None for no limit")

    def _check_resume(self) -> None:
        if self.resume is None:
            return
        if not isinstance(self.resume, (str, os.PathLike)):
            raise ValueError(f"resume is {self.resume!r}; want the folder of an earlier search, or None")
        folder = Path(self.resume).expanduser()
        if not (folder / JOURNAL).is_file():
            found = "has no" if folder.is_dir() else "is no folder with"
            raise ValueError(
                f"resume is {os.fspath(self.resume)!r}, which {found} {JOURNAL}; want result.run_dir of a search"
            )


def check_count(name: str, value: object, least: int, otherwise: str = "") -> None:
    """Check that ``value`` is a whole number, at least ``least``.

    Raises:
        ValueError: if it is not; ``otherwise`` is added to the text after the wanted number.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; want a number, at least {least}{otherwise}")
