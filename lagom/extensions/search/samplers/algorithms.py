"""Optuna's samplers, pruners and distributions for the settings of a config."""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.config.searchspace import Parameter
from lagom.errors import LagomError
from lagom.program.signature import function_name

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_HYPERBAND = "hyperband"
_LEAST_FOR_IMPORTANCE = 10
"""Number of completed trials below which importances are left out, since they would tell nothing."""


def require_optuna(config: HyperparameterOptConfig) -> None:
    """Check that all libraries that the search of ``config`` needs are installed.

    Raises:
        LagomError: if one is missing; the text says how to install it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise LagomError("a search needs Optuna, which is not installed here: pip install 'lagom-spark[search]'")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # Optuna imports tqdm's bar for notebooks
        importlib.import_module("optuna")
    if config.optimizer == "gp" and importlib.util.find_spec("scipy") is None:
        raise LagomError("optimizer='gp' needs SciPy, which is not installed here: pip install scipy")


def sampler(config: HyperparameterOptConfig, num_known: int = 0) -> BaseSampler:
    """Return the sampler that ``config`` asks for.

    Args:
        num_known: number of trials of the search before it was resumed, whose values a seeded sampler must not repeat.
    """
    from optuna import samplers

    if not isinstance(config.optimizer, str):
        chosen: BaseSampler = config.optimizer
        return chosen
    if config.optimizer == "grid":
        from lagom.extensions.search.samplers.grid_sampler import GridSampler  # imports Optuna

        return GridSampler(grid(config), seed=config.seed)  # skips values of earlier trials by itself
    seed = None if config.seed is None else (config.seed + 0x9E3779B1 * num_known) % 2**32
    if config.optimizer in ("tpe", _HYPERBAND):
        return samplers.TPESampler(seed=seed)
    return samplers.GPSampler(seed=seed) if config.optimizer == "gp" else samplers.RandomSampler(seed=seed)


def pruner(config: HyperparameterOptConfig) -> BasePruner:
    """Return the pruner that ``config`` asks for."""
    from optuna import pruners

    policy = config.es_policy
    if not isinstance(policy, str):
        chosen: BasePruner = policy
        return chosen
    if config.optimizer == _HYPERBAND:
        return pruners.HyperbandPruner(min_resource=config.es_interval)
    if "asha" in (config.optimizer, policy):
        # With 1, the default, Optuna decides by the length of the first trial: steps may be batches or epochs.
        return pruners.SuccessiveHalvingPruner(min_resource="auto" if config.es_interval == 1 else config.es_interval)
    if policy == "none":
        return pruners.NopPruner()
    return pruners.MedianPruner(n_startup_trials=config.es_min, interval_steps=config.es_interval)


def grid(config: HyperparameterOptConfig) -> dict[str, list[Any]]:
    """Return all values of each hyperparameter that a grid search tries.

    Raises:
        ValueError: for a range without a step.
    """
    space = config.searchspace
    if isinstance(space, Searchspace):
        return {each.name: each.grid() for each in space.parameters}
    assert isinstance(space, Mapping)
    return {name: _values(name, distribution) for name, distribution in space.items()}


def space_as_json(config: HyperparameterOptConfig) -> str | None:
    """Return the searchspace as JSON; None if it is a function."""
    from optuna.distributions import distribution_to_json

    space = config.searchspace
    if isinstance(space, Searchspace):
        return space.json()
    if isinstance(space, Mapping):
        return json.dumps(
            {name: json.loads(distribution_to_json(each)) for name, each in space.items()}, sort_keys=True
        )
    return None


def suggest(config: HyperparameterOptConfig, trial: Trial | FrozenTrial) -> dict[str, Any]:
    """Return the hyperparameters of ``trial``, as the training function gets them.

    Raises:
        ValueError: if the searchspace is a function, and returns or suggests something wrong.
    """
    space = config.searchspace
    if isinstance(space, Searchspace):
        return {each.name: each.value(_label(trial, each)) for each in space.parameters}
    if isinstance(space, Mapping):
        return {name: _suggested(trial, name, distribution) for name, distribution in space.items()}
    assert callable(space)
    given = space(trial)
    name = function_name(space)
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"the function searchspace={name} returned a {type(given).__name__}; want a dict of hparams, or "
            "nothing for the suggested values"
        )
    parameters = dict(trial.params if given is None else given)
    if wrong := [key for key in parameters if not isinstance(key, str)]:
        raise ValueError(f"the function searchspace={name} returned the key {wrong[0]!r}; names are strings")
    if both := [key for key in parameters if key in config.hparams]:
        raise ValueError(f"{both[0]!r} is in hparams and in searchspace; drop one of them")
    if not parameters:
        raise ValueError(f"the function searchspace={name} suggested nothing; call trial.suggest_float or such")
    return parameters


def importances(study: Study) -> dict[str, float]:
    """Return the importance of each hyperparameter for being in the better half of all trials; empty if unknown.

    The method is PED-ANOVA, which needs no other library. By default it looks at the best tenth: two of 20 trials,
    which agree by chance. A pruned trial counts as worse than all that have ended.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    complete = [each for each in study.get_trials(deepcopy=False) if each.state.name == "COMPLETE"]
    if len(complete) < _LEAST_FOR_IMPORTANCE:
        return {}
    evaluator = PedAnovaImportanceEvaluator(target_quantile=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importance = get_param_importances(_with_pruned_trials(study, complete), evaluator=evaluator)
        except (RuntimeError, ValueError):  # Optuna cannot assess these trials
            return {}
    return {name: share for name, share in importance.items() if math.isfinite(share)}


def _with_pruned_trials(study: Study, complete: Sequence[FrozenTrial]) -> Study:
    """Return a study of the ``complete`` trials of ``study``, and of its pruned ones with the worst value."""
    import optuna

    sign = 1 if study.direction is optuna.study.StudyDirection.MINIMIZE else -1
    worst = max(
        (sign * each.value for each in complete if each.value is not None and math.isfinite(each.value)), default=0.0
    )
    pruned = [each for each in study.get_trials(deepcopy=False) if each.state.name == "PRUNED"]
    values = [*((each, each.value) for each in complete), *((each, sign * (worst + abs(worst) + 1)) for each in pruned)]
    copied = optuna.create_study(direction=study.direction)
    copied.add_trials(
        [
            optuna.trial.create_trial(params=each.params, distributions=each.distributions, value=value)
            for each, value in values
        ]
    )
    return copied


def _label(trial: Trial | FrozenTrial, each: Parameter) -> Any:
    if each.type == "DOUBLE":
        return trial.suggest_float(each.name, *each.values, log=each.log)
    if each.type == "INTEGER":
        return trial.suggest_int(each.name, *each.values, log=each.log)
    return trial.suggest_categorical(each.name, each.labels)


def _suggested(trial: Trial | FrozenTrial, name: str, distribution: Any) -> Any:
    """Return the trial's value for one of Optuna's distributions, by the matching ``suggest_...`` method."""
    from optuna import distributions

    if isinstance(distribution, distributions.CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    ask: Callable[..., Any] = trial.suggest_int
    if isinstance(distribution, distributions.FloatDistribution):
        ask = trial.suggest_float
    return ask(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _values(name: str, distribution: Any) -> list[Any]:
    from optuna import distributions

    if isinstance(distribution, distributions.CategoricalDistribution):
        return list(distribution.choices)
    low, high, step = distribution.low, distribution.high, distribution.step
    if step is None:
        raise ValueError(
            f"a grid has no finite number of values for {name}, {distribution!r}; give it a step, or list the values"
        )
    return [low + number * step for number in range(round((high - low) / step) + 1)]
