"""``maggy.experiment``: ``lagom(train_fn, config)`` with Maggy's arguments."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

from lagom import config as lagom_config
from lagom import experiment
from lagom.extensions.compat.maggy.ablation import AblationConfig
from lagom.extensions.compat.maggy.config import BaseConfig, TorchDistributedConfig
from lagom.extensions.compat.maggy.hyperparameters import HyperparameterOptConfig
from lagom.extensions.compat.maggy.settable_trials import SettableTrials
from lagom.extensions.search.search_result import SearchResult
from lagom.launch import choose
from lagom.result import Result

__all__ = ["lagom"]

log = logging.getLogger("lagom")


def lagom(
    train_fn: Callable[..., Any], config: lagom_config.TorchDistributedConfig | None = None, **search: Any
) -> Result | SearchResult:
    """Run ``train_fn`` on every rank, or in trials of a search or an ablation study, like ``lagom.experiment.lagom``.

    If ``train_fn`` has a parameter ``module``, ``model``, ``train_set``, ``test_set`` or ``dataset`` without a default,
    and the config lacks that field, the parameter gets None. But ``model`` gets the config's module, and ``dataset`` a
    list of the config's that is no pair.

    Args:
        config: None for a run of one rank; in releases before 1.0 the name of the experiment.
        search: arguments of releases before 1.0: ``experiment_type``, and fields of ``HyperparameterOptConfig`` or
            ``AblationConfig``.
    """
    if search or isinstance(config, str):
        config = _earlier(config, search)
    if config is None:
        config = BaseConfig(name="maggy_experiment", description="experiment without config object")
    if isinstance(config, SettableTrials):
        config = config.with_defaults(experiment.command_line_fields())
    if isinstance(config, TorchDistributedConfig):
        config = config.with_defaults(experiment.command_line_fields())
        if _asks_for_fp16(config.deepspeed_config) and not choose(config.launcher).cluster().gpus_per_slot:
            log.warning("DeepSpeed has no fp16 on CPUs: forwards are computed in bf16, with mixed_precision='bf16'")
            wanted = {**(config.deepspeed_config or {}), "fp16": {"enabled": False}}
            config = config.replace({"deepspeed_config": wanted, "mixed_precision": "bf16"})
    return experiment.lagom(_with_missing_arguments(train_fn, config), config)


def _earlier(name: Any, search: Mapping[str, Any]) -> HyperparameterOptConfig | AblationConfig:
    """Return the config for arguments of Maggy before 1.0: the name by position, and fields by their names."""
    given = {field: value for field, value in search.items() if field != "experiment_type"}
    named = {"name": name} if isinstance(name, str) else {}
    if search.get("experiment_type") == "ablation":
        return AblationConfig(**named | given)
    for field in ("ablator", "ablation_study"):
        given.pop(field, None)
    return HyperparameterOptConfig(**{"num_trials": 1, "optimization_key": "metric"} | named | given)


def _asks_for_fp16(deepspeed_config: Any) -> bool:
    fp16 = deepspeed_config.get("fp16") if isinstance(deepspeed_config, Mapping) else None
    return isinstance(fp16, Mapping) and bool(fp16.get("enabled"))


def _with_missing_arguments(
    train_fn: Callable[..., Any], config: lagom_config.TorchDistributedConfig
) -> Callable[..., Any]:
    try:
        asked = inspect.signature(train_fn).parameters
    except (TypeError, ValueError):
        return train_fn  # lagom itself raises the error for an object without a signature
    sets: Any = getattr(config, "sets", None)
    module = config.of_a_trial().module if isinstance(config, AblationConfig) else config.module
    searched = config.searchspace if isinstance(config, HyperparameterOptConfig) else ()
    both = {"train_set": config.train_set, "test_set": config.test_set}
    if config.dataset is not None:
        both = dict(zip(both, config.dataset, strict=True))
    provided = {name for name, value in {"module": module, **both}.items() if value is not None}
    if None not in both.values():
        provided.add("dataset")
    if isinstance(config, AblationConfig) and module is not None:
        provided.add("model")  # each trial provides its own
    stands_in = {"model": module, "module": None, **dict.fromkeys(both), "dataset": sets}
    provided |= {*config.hparams, *(name for name in stands_in if isinstance(searched, Container) and name in searched)}
    absent = {
        name: stands_in[name]
        for name, parameter in asked.items()
        if name in stands_in and name not in provided and parameter.default is parameter.empty
    }
    if not absent:
        return train_fn
    return functools.partial(train_fn, **absent)
