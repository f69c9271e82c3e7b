"""``search``: find the best hyperparameters of a training function by trials."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.extensions.search.run_trials import run_trials
from lagom.extensions.search.search_result import SearchResult
from lagom.extensions.search.study import Study
from lagom.program.payload import Parcel

_MAX_CHOICE = 256 << 10  # bytes; a trial travels in one message, of 1 MB at most
_PLAIN = (str, int, float, bool, type(None))


def search(train: Callable[..., Any], config: HyperparameterOptConfig) -> SearchResult:
    """Run trials of ``train`` until ``config`` says that there are enough; on Ctrl-C, return the trials so far.

    Raises:
        ValueError: before any start, if the function's parameters do not fit the config, or a choice is too large for a
            message; later, if a searchspace that is a function suggests or returns something wrong.
        PayloadError: if the function, its data or a choice cannot be pickled.
        PlanError: if a trial does not fit the cluster, or a setting (verify, timeline) is for one run only.
        LagomError: if Optuna is missing, no slot is left, or the search to resume is another one or still running.
        MetricError: if a trial has no metric, and no trial has completed before.
        Exception: the last trial's exception (a LagomError if its processes were lost), if ``max_failed_trials`` trials
            in a row have failed; or the exception of a searchspace function.
    """
    _check_choices(config.searchspace)
    study, ran = run_trials(
        train,
        config,
        functools.partial(Study, config),
        num_trials=config.num_trials,
        searched=_examples(train, config),
    )
    return SearchResult(
        study.trials(),
        direction=config.direction or "max",
        hparams=config.hparams,
        study=study.optuna,
        metric=config.optimization_key,
        logarithmic=_logarithmic(config.searchspace, study.optuna),
        **dataclasses.asdict(ran),
    )


def _logarithmic(space: Any, study: Any) -> set[str]:
    """Return the hyperparameters with a logarithmic scale.

    If ``space`` is a function, only hyperparameters that it has suggested in the study's trials are known.
    """
    if isinstance(space, Searchspace):
        return {each.name for each in space.parameters if each.log}
    found = [space] if isinstance(space, Mapping) else [trial.distributions for trial in study.get_trials()]
    return {name for each in found for name, one in each.items() if getattr(one, "log", False)}


def _check_choices(space: Any) -> None:
    for parameter in space.parameters if isinstance(space, Searchspace) else ():
        for value in parameter.values:
            if not isinstance(value, _PLAIN) and (size := Parcel(value).size) > _MAX_CHOICE:
                raise ValueError(
                    f"{parameter.name} in the searchspace has a choice of {size >> 10} KB, and each trial is sent its "
                    f"choice: want at most {_MAX_CHOICE >> 10} KB. Put large objects into hparams, in a dict, and "
                    "search over its keys"
                )


def _examples(train: Callable[..., Any], config: HyperparameterOptConfig) -> Mapping[str, Any]:
    """Return a value for each hyperparameter that a trial has, to check the function's arguments with."""
    if isinstance(config.searchspace, Searchspace):
        return dict.fromkeys(config.searchspace.names())
    if isinstance(config.searchspace, Mapping):
        return dict.fromkeys(config.searchspace)
    # A searchspace function names its hyperparameters only in a trial, so each parameter not in hparams may be one.
    names = inspect.signature(train).parameters
    return {name: None for name in names if name not in config.hparams}
