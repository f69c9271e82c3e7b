"""``maggy.experiment``: ``lagom(train_fn, config)`` with Maggy's arguments."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from lagom import config as lagom_config
from lagom import experiment
from lagom.compat.maggy.config import BaseConfig, TorchDistributedConfig
from lagom.compat.maggy.search import SEARCH
from lagom.launchers import choose
from lagom.result import Result

__all__ = ["lagom"]

log = logging.getLogger("lagom")


def lagom(
    train_fn: Callable[..., Any], config: lagom_config.TorchDistributedConfig | None = None, **search: Any
) -> Result:
    """Run ``train_fn`` on every rank, like ``lagom.experiment.lagom``.

    ``module``, ``train_set``, ``test_set`` and ``dataset`` are None for a function that asks for them if the config
    lacks them.

    Args:
        search: arguments of releases before 1.0.

    Raises:
        NotImplementedError: for such arguments, which could only ask for a search.
    """
    if search or isinstance(config, str):
        raise NotImplementedError(f"Maggy's search before 1.0 is not served by lagom; {SEARCH}")
    if config is None:
        config = BaseConfig(name="maggy_experiment", description="experiment without config object")
    if isinstance(config, TorchDistributedConfig):
        config = config.with_defaults(experiment.command_line_fields())
        if _asks_for_fp16(config.deepspeed_config) and not choose(config.launcher).cluster().gpus_per_slot:
            log.warning("DeepSpeed has no fp16 on CPUs: forwards are computed in bf16, with mixed_precision='bf16'")
            wanted = {**(config.deepspeed_config or {}), "fp16": {"enabled": False}}
            config = config.replace({"deepspeed_config": wanted, "mixed_precision": "bf16"})
    return experiment.lagom(_with_missing_arguments(train_fn, config), config)


def _asks_for_fp16(deepspeed_config: Any) -> bool:
    fp16 = deepspeed_config.get("fp16") if isinstance(deepspeed_config, Mapping) else None
    return isinstance(fp16, Mapping) and bool(fp16.get("enabled"))


def _with_missing_arguments(
    train_fn: Callable[..., Any], config: lagom_config.TorchDistributedConfig
) -> Callable[..., Any]:
    try:
        asked = inspect.signature(train_fn).parameters
    except (TypeError, ValueError):
        return train_fn  # lagom says what is wrong with it
    sets = config.sets if isinstance(config, TorchDistributedConfig) else None
    both = {"train_set": config.train_set, "test_set": config.test_set}
    if config.dataset is not None:
        both = dict(zip(both, config.dataset, strict=True))
    provided = {name for name, value in {"module": config.module, **both}.items() if value is not None}
    if None not in both.values():
        provided.add("dataset")
    absent = {
        name: sets if name == "dataset" else None
        for name, parameter in asked.items()
        if name in ("module", *both, "dataset") and name not in provided and parameter.default is parameter.empty
    }
    if not absent:
        return train_fn
    found = functools.partial(train_fn, **absent)
    found.__name__ = getattr(train_fn, "__name__", "lagom")  # type: ignore[attr-defined]  # what a run is called
    return found
