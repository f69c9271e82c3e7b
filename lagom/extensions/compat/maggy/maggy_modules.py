"""The modules of Maggy that lagom serves."""

from __future__ import annotations

import importlib
from types import ModuleType

from lagom.extensions.compat.served_modules import ServedModules

_HOMES = {
    "maggy": "search",
    "maggy.ablation": "ablation",
    "maggy.ablation.ablationstudy": "ablation",
    "maggy.config": "config",
    "maggy.config.ablation": "ablation",
    "maggy.config.hyperparameter_optimization": "hyperparameters",
    "maggy.config.lagom": "config",
    "maggy.config.torch_distributed": "config",
    "maggy.core": "",
    "maggy.core.patching": "patching",
    "maggy.core.patching.dataloader": "patching",
    "maggy.experiment": "experiment",
    "maggy.experiment.experiment": "experiment",
    "maggy.experiment_config": "config",
    "maggy.experiment_config.ablation": "ablation",
    "maggy.experiment_config.lagom": "config",
    "maggy.experiment_config.optimization": "hyperparameters",
    "maggy.experiment_config.torch_distributed": "config",
    "maggy.searchspace": "search",
    "maggy.tensorboard": "tensorboard",
}
"""Maggy's modules, and for each the module of this package whose public names it gets."""
_OPTIMIZER = "pass optimizer='random', 'grid', 'tpe', 'gp', 'asha' or 'hyperband', or a sampler of Optuna's"
_EARLYSTOP = "pass es_policy='median', 'asha' or 'none', or a pruner of Optuna's"
_INSTEAD = {
    "maggy.ablation.ablator": "lagom leaves out one component at a time, ablator='loco'",
    "maggy.callbacks": "it is for Keras; in a loop of PyTorch's own call reporter.broadcast(metric=...)",
    "maggy.earlystop": _EARLYSTOP,
    "maggy.optimizer": _OPTIMIZER,
    "maggy.pruner": _OPTIMIZER,
}


def _fill(module: ModuleType) -> None:
    if name := _HOMES[module.__name__]:
        home = importlib.import_module(f"lagom.extensions.compat.maggy.{name}")
        vars(module).update({public: getattr(home, public) for public in home.__all__})
        if hasattr(home, "__getattr__"):
            vars(module)["__getattr__"] = home.__getattr__


served = ServedModules(dict.fromkeys(_HOMES, _fill), _INSTEAD, "LAGOM_COMPAT_MAGGY")
