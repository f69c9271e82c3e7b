"""The modules of Maggy that lagom serves."""

from __future__ import annotations

import importlib
from types import ModuleType

from lagom.compat.served_modules import ServedModules

_HOMES = {
    "maggy": "search",
    "maggy.config": "config",
    "maggy.config.lagom": "config",
    "maggy.config.torch_distributed": "config",
    "maggy.core": "",
    "maggy.core.patching": "patching",
    "maggy.core.patching.dataloader": "patching",
    "maggy.experiment": "experiment",
    "maggy.experiment.experiment": "experiment",
    "maggy.experiment_config": "config",
    "maggy.experiment_config.lagom": "config",
    "maggy.experiment_config.torch_distributed": "config",
    "maggy.searchspace": "search",
    "maggy.tensorboard": "tensorboard",
}
"""Maggy's modules, and for each the module of this package whose public names it gets."""
_INSTEAD_OF_SEARCH = (
    "call experiment.lagom with a TorchDistributedConfig(hparams=...) for each trial, as in an objective of Optuna's"
)
_INSTEAD = {
    "maggy.ablation": "call experiment.lagom for each variant of the module, in a loop",
    "maggy.callbacks": "it is for Keras; in a loop of PyTorch's own call reporter.broadcast(metric=...)",
    "maggy.earlystop": _INSTEAD_OF_SEARCH,
    "maggy.optimizer": _INSTEAD_OF_SEARCH,
    "maggy.pruner": _INSTEAD_OF_SEARCH,
}


def _fill(module: ModuleType) -> None:
    if name := _HOMES[module.__name__]:
        home = importlib.import_module(f"lagom.compat.maggy.{name}")
        vars(module).update({public: getattr(home, public) for public in home.__all__})
        if hasattr(home, "__getattr__"):
            vars(module)["__getattr__"] = home.__getattr__


served = ServedModules(dict.fromkeys(_HOMES, _fill), _INSTEAD, "LAGOM_COMPAT_MAGGY")
