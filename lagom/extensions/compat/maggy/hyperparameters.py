"""``HyperparameterOptConfig`` of ``maggy.config``, earlier ``OptimizationConfig``, as a subclass of lagom's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lagom import config
from lagom.extensions.compat.maggy.settable_trials import SettableTrials

__all__ = ["HyperparameterOptConfig", "OptimizationConfig"]

_NAMES = (
    "num_trials",
    "optimizer",
    "searchspace",
    "optimization_key",
    "direction",
    "es_interval",
    "es_min",
    "es_policy",
    "name",
    "description",
    "hb_interval",
    "model",
)


class HyperparameterOptConfig(SettableTrials, config.HyperparameterOptConfig):
    """Maggy's config of a search, which takes any field of lagom's.

    As in Maggy, fields may be passed by position, and set afterwards, ``direction`` is "max" unless it is given, and
    ``es_policy`` "median".

    Args:
        positional: the fields in Maggy's order, which ends with ``model`` and ``dataset``, or before Maggy 1.1 with
            ``model``, ``train_set`` and ``test_set``.
        given: fields of lagom's config, and ``model`` for ``module``. ``dataset`` may be a list of any length.
    """

    sets: Sequence[Any] | None
    """``dataset``, if it is not a pair."""

    def __init__(self, *positional: Any, **given: Any) -> None:
        self._set_up(_NAMES, positional, given, name="HPOptimization", direction="max", es_policy="median")


OptimizationConfig = HyperparameterOptConfig
