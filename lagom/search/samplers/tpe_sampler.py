"""``TPESampler``: Optuna's TPE sampler, made faster for searches of many trials."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from optuna import Study, samplers
from optuna.distributions import BaseDistribution
from optuna.samplers._tpe.sampler import _get_pruned_trial_score, default_gamma
from optuna.trial import FrozenTrial, TrialState


def known_version() -> bool:
    """Return whether the installed Optuna is one whose sampler ``TPESampler`` is written for."""
    return optuna.__version__.startswith("5.0.")


class TPESampler(samplers.TPESampler):
    """Optuna's sampler by tree-structured Parzen estimators, which draws the same values in half the time.

    For each trial Optuna intersects the spaces of all earlier trials, and reads, converts and sorts all their values:
    with 500 running trials, half of the time of a draw. Here the space is given, and a trial is read only twice: when
    it has its values, and when it has ended.

    Args:
        space: distribution of each hyperparameter, the same in all trials.
        seed: as for Optuna.
    """

    def __init__(self, space: Mapping[str, BaseDistribution], seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self._space = {name: space[name] for name in sorted(space) if not space[name].single()}
        self._values = np.empty((0, len(self._space)))  # row: number of the trial; column: hyperparameter
        self._has_values: set[int] = set()
        self._ended: set[int] = set()
        self._complete: list[tuple[float, int]] = []  # objective, smaller is better, and number of trial; sorted
        self._pruned: list[tuple[tuple[float, float], int]] = []

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the hyperparameters that are drawn jointly: the whole space."""
        return dict(self._space)

    def _sample(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Draw the values of ``trial`` as Optuna's own method does."""
        if search_space != self._space:
            return super()._sample(study, trial, search_space)
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        trials = study._get_trials(deepcopy=False, states=states)
        numbers = [each.number for each in trials if each.number != trial.number and self._read(each, study)]
        num_below = default_gamma(len(self._ended))
        below = [number for _, number in self._complete[:num_below]]
        below += [number for _, number in self._pruned[: num_below - len(below)]]
        is_below = np.isin(numbers, below)
        estimators = [
            self._parzen_estimator_cls(
                dict(zip(self._space, self._values[np.compress(chosen, numbers)].T, strict=True)),
                self._space,
                self._parzen_estimator_parameters,
            )
            for chosen in (is_below, ~is_below)
        ]
        candidates = estimators[0].sample(self._rng.rng, self._n_ei_candidates)
        best = self._compare(candidates, self._compute_acquisition_func(candidates, *estimators))
        return {name: each.to_external_repr(best[name]) for name, each in self._space.items()}

    def _read(self, trial: FrozenTrial, study: Study) -> bool:
        """Record the values of ``trial``, and its outcome if it has ended; return whether it has all values."""
        number = trial.number
        if number not in self._has_values:
            params = self._get_params(trial, study)
            if not self._space.keys() <= params.keys():
                return False
            if number >= len(self._values):
                self._values.resize((2 * number + 1, len(self._space)), refcheck=False)
            self._values[number] = [each.to_internal_repr(params[name]) for name, each in self._space.items()]
            self._has_values.add(number)
        if number not in self._ended and trial.state is not TrialState.RUNNING:
            self._ended.add(number)
            if trial.state is TrialState.PRUNED:
                bisect.insort(self._pruned, (_get_pruned_trial_score(trial, study), number))
            else:
                sign = -1 if study.direction is optuna.study.StudyDirection.MAXIMIZE else 1
                bisect.insort(self._complete, (sign * trial.values[0], number))
        return True
