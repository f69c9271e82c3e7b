"""``Study``: a search's trials, chosen and judged by Optuna."""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lagom.config import HyperparameterOptConfig
from lagom.config.trials import JOURNAL
from lagom.errors import LagomError
from lagom.extensions.search.on_rank.change import HparamsChange
from lagom.extensions.search.samplers.algorithms import grid, pruner, require_optuna, sampler, space_as_json, suggest
from lagom.extensions.search.trial_journal import TrialJournal
from lagom.extensions.search.trial_source import TrialOutcome, TrialSpec

if TYPE_CHECKING:
    import optuna

_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
_MAX_RETURNED = 4096  # characters of JSON; a longer return value is not kept in the trial's record
_SPACE = "searchspace"
_SHARED = "shared"
log = logging.getLogger("lagom")
_DIRECTIONS: dict[str, Literal["minimize", "maximize"]] = {"min": "minimize", "max": "maximize"}


@dataclass(slots=True)
class _Running:
    trial: optuna.Trial
    steps: set[int]
    """Steps for which the trial has reported a value, in earlier attempts too."""


class Study:
    """Asks Optuna for trials and tells it their outcomes, as ``optuna.Study.optimize`` does, with many running at once.

    With one slot the trials are those of ``optimize``, bit for bit. Trials are kept in a journal in ``folder``, from
    which another ``Study`` goes on: trials that ended count, and trials that were running are asked for again.

    Args:
        config: settings of the search. ``config.seed`` seeds the sampler; if None, each search draws other values.
        folder: folder of the journal; None keeps the trials in memory.

    Raises:
        LagomError: if Optuna (or SciPy, for "gp") is missing, another process runs this search, or the journal has
            another metric, direction or searchspace.
    """

    def __init__(self, config: HyperparameterOptConfig, folder: Path | None = None) -> None:
        require_optuna(config)
        self._config = config
        self._journal = TrialJournal(folder / JOURNAL) if folder is not None else None
        self._folder = folder
        self._running: dict[int, _Running] = {}
        self._params: dict[int, dict[str, Any]] = {}
        self._stopped = False
        try:
            self.optuna = _opened(config, self._journal)
            """Optuna's own study."""
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise
        known = self.optuna.get_trials(deepcopy=False)
        self._has_completed = any(each.state.name == "COMPLETE" for each in known)
        self._has_reported = any(each.intermediate_values for each in known)
        self._num_asked = sum(1 for each in known if each.state.name != "WAITING")
        self._again = [each for each in known if each.state.name == "RUNNING"]
        self._limit = _limit(config)
        self._deadline = time.monotonic() + config.timeout_s if config.timeout_s is not None else math.inf

    @property
    def finished(self) -> bool:
        """Return whether ``ask`` has no more trials: all were asked for, time is over, or the sampler is done."""
        if self._stopped or time.monotonic() >= self._deadline:
            return True
        return not self._again and self._num_asked >= self._limit

    def ask(self) -> TrialSpec | None:
        """Return the next trial, or None if the search is finished; trials that a killed driver left come first.

        Raises:
            ValueError: if the searchspace is a function that returns or suggests something wrong.
            Exception: the exception of the searchspace function, if it raises one.
        """
        import optuna

        if self.finished:
            return None
        if self._again:
            frozen = self._again.pop(0)
            trial = optuna.Trial(self.optuna, frozen._trial_id)
            steps = set(frozen.intermediate_values)
        else:
            trial, steps = self.optuna.ask(), set[int]()
            self._num_asked += 1
        try:
            params = suggest(self._config, trial)
        except BaseException:
            self._end(trial, state=optuna.trial.TrialState.FAIL)
            raise
        self._running[trial.number] = _Running(trial, steps)
        self._params[trial.number] = params
        return TrialSpec(number=trial.number, params=params, change=HparamsChange(params))

    def report(self, number: int, step: int, value: float) -> bool:
        """Note that the trial ``number`` has ``value`` at ``step``; return whether the pruner ends it.

        Only the first value of a step counts.
        """
        running = self._running[number]
        if step in running.steps:
            return False
        running.steps.add(step)
        self._has_reported = True
        running.trial.report(value, step)
        return running.trial.should_prune()

    def tell(self, number: int, outcome: TrialOutcome) -> None:
        """Note how the trial ``number`` ended."""
        from optuna.trial import TrialState

        trial = self._running.pop(number).trial
        facts = {
            "seconds": outcome.seconds,
            "started": outcome.started,
            "prepare_s": outcome.prepare_s,
            "slot": outcome.slot,
            "error": outcome.error,
            "traceback": outcome.traceback,
        }
        if outcome.folder is not None and self._folder is not None:  # else the trial's folder is a temporary one
            facts["folder"] = self._relative(outcome.folder)
        if (text := _as_json(outcome.returned)) is not None and outcome.returned is not None:
            facts["returned"] = text
        for name, fact in facts.items():
            if fact not in ("", None):
                trial.set_user_attr(name, fact)
        if outcome.state == "failed":
            self._end(trial, state=TrialState.FAIL)
        elif outcome.state == "pruned":
            self._end(trial, state=TrialState.PRUNED)
        else:
            self._warn_if_unreported(number)
            self._end(trial, outcome.value)

    def _warn_if_unreported(self, number: int) -> None:
        """Say once that bad trials are not stopped early, if the first complete trial has reported no value."""
        from optuna.pruners import MedianPruner, NopPruner

        pruner = self.optuna.pruner
        may_stop = not isinstance(pruner, NopPruner)
        if isinstance(pruner, MedianPruner):
            may_stop = self._limit > self._config.es_min
        if may_stop and not self._has_completed and not self._has_reported:
            log.warning(
                "trial %d reported no value of %r before its end, so it counts for no early stopping; if the function "
                "logs a metric, name it as optimization_key",
                number,
                self._config.optimization_key,
            )
        self._has_completed = True

    def trials(self) -> list[dict[str, Any]]:
        """Return one dict for each trial that has ended, in the order of the trials' numbers.

        The keys are "number", "params", "value", "state" ("complete", "pruned" or "failed"), "seconds", "started",
        "prepare_s", "slot", "error", "traceback", "folder" and "returned". The "value" of a pruned trial is the value
        that it reported at its last step; the "value" of a failed trial is None.
        """
        found = self.optuna.get_trials(deepcopy=False)
        return [self._row(each) for each in found if each.state.name in _STATES]

    @property
    def kept_trial(self) -> int | None:
        """Return the number of the best trial, the first of equal ones; None if none has run to its end."""
        complete = [trial for trial in self.trials() if trial["state"] == "complete"]
        sign = -1 if self._config.direction == "max" else 1
        return min(complete, key=lambda trial: sign * trial["value"])["number"] if complete else None

    def close(self) -> None:
        """Close the journal; the trials can still be read, and ``ask`` gives no more."""
        self._stopped = True
        if self._journal is not None:
            self._journal.close()

    def _row(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        facts = trial.user_attrs
        folder, returned = facts.get("folder"), facts.get("returned")
        return {
            "number": trial.number,
            "params": self._params_of(trial),
            "value": trial.value,
            "state": _STATES[trial.state.name],
            "seconds": facts.get("seconds"),
            "started": facts.get("started"),
            "prepare_s": facts.get("prepare_s", 0.0),
            "slot": facts.get("slot"),
            "error": facts.get("error", ""),
            "traceback": facts.get("traceback", ""),
            "folder": self._folder / folder if self._folder is not None and folder is not None else folder,
            "returned": json.loads(returned) if returned is not None else None,
        }

    def _params_of(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        """Return the hyperparameters of an ended trial; for one of an earlier process, ask the searchspace again."""
        if trial.number in self._params:
            return dict(self._params[trial.number])
        try:
            return suggest(self._config, trial)
        except Exception:  # the trial has failed while the searchspace suggested its values
            return dict(trial.params)

    def _end(self, trial: optuna.Trial, value: float | None = None, state: Any = None) -> None:
        try:
            self.optuna.tell(trial, value, state)
        except RuntimeError:
            # A sampler that has tried all values, such as the grid's, stops the study. Outside its own loop Optuna then
            # raises an error, but it has recorded the trial before.
            if not self.optuna.get_trials(deepcopy=False)[trial.number].state.is_finished():
                raise
            self._stopped = True

    def _relative(self, folder: Path) -> str:
        """Return ``folder`` as text for the journal: relative to the search's folder, which may be moved later."""
        if self._folder is not None and folder.is_relative_to(self._folder):
            return str(folder.relative_to(self._folder))
        return str(folder)


def _opened(config: HyperparameterOptConfig, journal: TrialJournal | None) -> optuna.Study:
    """Return a new study of Optuna's, or the one in ``journal``.

    Raises:
        LagomError: if the study in ``journal`` has another metric, direction or searchspace than ``config``.
    """
    import optuna
    from optuna.storages import InMemoryStorage, JournalStorage

    space = space_as_json(config)
    with _quiet():
        storage: Any = JournalStorage(journal) if journal is not None else InMemoryStorage()  # type: ignore[arg-type]
        names = [each.study_name for each in storage.get_all_studies()]
        if not names:
            study = optuna.create_study(
                study_name=config.name or "search",
                storage=storage,
                sampler=sampler(config),
                pruner=pruner(config),
                direction=_DIRECTIONS[config.direction or "max"],
            )
            study.set_user_attr(_SPACE, space)
            study.set_user_attr(_SHARED, _shared(config))
            return study
        study = optuna.load_study(study_name=names[0], storage=storage, pruner=pruner(config))
        study.sampler = sampler(config, num_known=len(study.get_trials(deepcopy=False)))
    shared = study.user_attrs.get(_SHARED, {})
    metric = config.optimization_key
    for name, before, now in (
        ("optimization_key", shared.get("optimization_key", metric), metric),
        ("direction", study.direction.name.lower(), _DIRECTIONS[config.direction or "max"]),
        ("searchspace", study.user_attrs.get(_SPACE), space),
    ):
        if before != now:
            raise LagomError(f"the search to resume had {name}={before}, and now has {now}; resume with the same")
    for name, now in _shared(config).items():
        if shared.get(name, now) != now:
            log.warning(
                "the search to resume had %s=%s, and now has %s: its trials are compared with new ones, and "
                "best_config says the new value of all",
                name,
                shared[name],
                now,
            )
    return study


def _shared(config: HyperparameterOptConfig) -> dict[str, Any]:
    """Return the name of the metric and the plain ``hparams``, which all trials of the search share."""
    hparams = {name: value for name, value in config.hparams.items() if isinstance(value, (str, int, float, bool))}
    return {"optimization_key": config.optimization_key, "hparams": hparams}


def _limit(config: HyperparameterOptConfig) -> float:
    """Return the largest number of trials of the search; infinity if only ``timeout_s`` limits it."""
    limit: float = config.num_trials if config.num_trials is not None else math.inf
    if config.optimizer == "grid":
        limit = min(limit, math.prod(len(values) for values in grid(config).values()))
    return limit


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's log line about a new study, and its warnings about experimental classes."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _as_json(value: Any) -> str | None:
    """Return ``value`` as JSON if that is short, else None."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return None
    return text if len(text) <= _MAX_RETURNED else None
