"""Finds ``maggy`` and its modules in lagom, where the real one is not installed or it is asked for."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_VARIABLE = "LAGOM_COMPAT_MAGGY"
"""Set to "force" where lagom is to serve maggy though it is installed; it reaches the ranks with the environment."""
_HOME = "lagom.compat.maggy."
_SERVED = {
    "maggy": "search",
    "maggy.config": "config",
    "maggy.config.lagom": "config",
    "maggy.config.torch_distributed": "config",
    "maggy.core": None,
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
"""Maggy's modules, each with the one here whose names it has."""
_SEARCH = (
    "call experiment.lagom with a TorchDistributedConfig(hparams=...) for each trial, as in an objective of Optuna's"
)
_REMEDIES = {
    "maggy.ablation": "call experiment.lagom for each variant of the module, in a loop",
    "maggy.callbacks": "it is for Keras; in a loop of PyTorch's own call reporter.broadcast(metric=...)",
    "maggy.earlystop": _SEARCH,
    "maggy.optimizer": _SEARCH,
    "maggy.pruner": _SEARCH,
}


def install(*, force: bool = False) -> None:
    """Have ``import maggy`` give what lagom serves; nothing changes where the real Maggy is installed.

    Args:
        force: also then, in this process and in the runs that it starts.
    """
    if force:
        os.environ[_VARIABLE] = "force"
    if installed() or (_is_there() and os.environ.get(_VARIABLE) != "force"):
        return
    _forget()
    sys.meta_path.insert(0, _Finder())


def installed() -> bool:
    """Whether ``import maggy`` gives what lagom serves."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def remove() -> None:
    """Undo ``install``."""
    os.environ.pop(_VARIABLE, None)
    if installed():
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        _forget()


def _is_there() -> bool:
    """Whether Maggy is installed; a folder or a script of that name is not it."""
    spec = PathFinder.find_spec("maggy")
    return spec is not None and spec.submodule_search_locations is not None and spec.origin is not None


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "maggy"]:
        del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "maggy":
            return None
        if name not in _SERVED:
            top = ".".join(name.split(".")[:2])
            if top in _REMEDIES:
                raise ImportError(f"{name} is not served by lagom; {_REMEDIES[top]}", name=name)
            return None
        is_package = any(other.startswith(name + ".") for other in _SERVED)
        return importlib.util.spec_from_loader(name, _Loader(_SERVED[name]), is_package=is_package)


class _Loader(importlib.abc.Loader):
    """Fills a module with the public names of one of lagom's."""

    def __init__(self, home: str | None) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._home is not None:
            home = importlib.import_module(_HOME + self._home)
            vars(module).update({name: getattr(home, name) for name in home.__all__})
            if hasattr(home, "__getattr__"):
                vars(module)["__getattr__"] = home.__getattr__
