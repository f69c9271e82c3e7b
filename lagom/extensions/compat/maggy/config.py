"""``maggy.config`` and ``maggy.experiment_config``: Maggy's configs, as subclasses of lagom's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lagom import config
from lagom.extensions.compat.maggy.ablation import AblationConfig
from lagom.extensions.compat.maggy.hyperparameters import HyperparameterOptConfig, OptimizationConfig
from lagom.extensions.compat.maggy.search import unserved
from lagom.extensions.compat.maggy.settable import Settable, by_position

__all__ = [
    "AblationConfig",
    "BaseConfig",
    "HyperparameterOptConfig",
    "LagomConfig",
    "OptimizationConfig",
    "TfDistributedConfig",
    "TorchDistributedConfig",
]

LagomConfig = config.TorchDistributedConfig
_REST = ("hparams", "backend", "mixed_precision", "zero_lvl", "deepspeed_config", "name", "hb_interval", "description")
_EARLIER = ("train_set", "test_set", *_REST)
_LATER = ("dataset", *_REST)

TfDistributedConfig = unserved(
    "TfDistributedConfig", "lagom trains PyTorch; for TensorFlow there is tf.distribute.MultiWorkerMirroredStrategy"
)


class TorchDistributedConfig(Settable, config.TorchDistributedConfig):
    """Maggy's config, which takes any field of lagom's; ``batches`` is "per_rank" unless it is given.

    As in Maggy, fields may be passed by position, in the order of either release, and set afterwards.

    Args:
        module: lagom's field.
        positional: the fields after ``module``. They are in the order of Maggy 1.1 if the first is a list of data sets,
            or None before a dict of hyperparameters; else in the order of Maggy 1.0.
        given: fields of lagom's config. ``dataset`` may be a list of any length.
    """

    sets: Sequence[Any] | None
    """``dataset``, if it is not a pair."""

    def __init__(self, module: Any = None, *positional: Any, **given: Any) -> None:
        names = _LATER if _is_later(positional) else _EARLIER
        given |= by_position(type(self).__name__, ("module", *names), (module, *positional), given)
        given["hparams"] = given.get("hparams") or {}
        sets = given.get("dataset")
        if isinstance(sets, (list, tuple)) and len(sets) != 2:
            del given["dataset"]
        else:
            sets = None
        if given.get("backend", "torch") == "deepspeed":
            given["zero_lvl"] = given.get("zero_lvl") or _stage(given.get("deepspeed_config"))
            given["deepspeed_config"] = _with_torch_adam(given.get("deepspeed_config"))
        elif given.get("deepspeed_config") is not None:
            warnings.warn("deepspeed_config is not used: backend is 'torch'", stacklevel=2)
            del given["deepspeed_config"]
        given.setdefault("batches", "per_rank")
        super().__init__(**given)
        object.__setattr__(self, "sets", sets)

    def replace(self, given: Mapping[str, Any]) -> TorchDistributedConfig:
        """Return a copy with the fields in ``given`` replaced."""
        found = TorchDistributedConfig(**{each.name: getattr(self, each.name) for each in fields(self)} | dict(given))
        object.__setattr__(found, "sets", self.sets)
        return found

    def with_defaults(self, given: Mapping[str, Any]) -> TorchDistributedConfig:
        """Return a copy in which fields that have default values take the values in ``given``, if they are there."""
        plain = TorchDistributedConfig()
        return self.replace({n: value for n, value in given.items() if getattr(self, n) == getattr(plain, n)})

    @property
    def ds_config(self) -> Any:
        """Return ``deepspeed_config``, by Maggy's name."""
        return self.deepspeed_config


class BaseConfig(TorchDistributedConfig):
    """Config of an experiment without a module, whose function runs once, as in Maggy."""

    __slots__ = ()

    def __init__(self, name: str = "base", hb_interval: float = 1, description: str = "", **given: Any) -> None:
        super().__init__(
            **{"name": name, "hb_interval": hb_interval, "description": description, "world_size": 1, **given}
        )


def _is_later(positional: tuple[Any, ...]) -> bool:
    if not positional:
        return False
    first, *others = positional
    return isinstance(first, (list, tuple)) or (first is None and bool(others) and isinstance(others[0], Mapping))


def _stage(deepspeed_config: Any) -> int:
    zero = deepspeed_config.get("zero_optimization") if isinstance(deepspeed_config, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _with_torch_adam(deepspeed_config: Any) -> Any:
    """Ask for torch's Adam, as Maggy did: DeepSpeed compiles its own on first use, which takes minutes."""
    optimizer = deepspeed_config.get("optimizer") if isinstance(deepspeed_config, Mapping) else None
    if not isinstance(optimizer, Mapping) or optimizer.get("type") != "Adam":
        return deepspeed_config
    parameters = {"torch_adam": True, **(optimizer.get("params") or {})}
    return {**deepspeed_config, "optimizer": {**optimizer, "params": parameters}}
