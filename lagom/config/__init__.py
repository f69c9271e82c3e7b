"""Settings of runs, searches and ablation studies, one file for each config class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lagom.config.torch_distributed import TorchDistributedConfig

if TYPE_CHECKING:
    from lagom.config.ablation import AblationConfig
    from lagom.config.ablation_study import AblationStudy
    from lagom.config.hyperparameter_opt import HyperparameterOptConfig
    from lagom.config.searchspace import Searchspace

__all__ = ["AblationConfig", "AblationStudy", "HyperparameterOptConfig", "Searchspace", "TorchDistributedConfig"]

_MODULES = {
    "AblationConfig": "ablation",
    "AblationStudy": "ablation_study",
    "HyperparameterOptConfig": "hyperparameter_opt",
    "Searchspace": "searchspace",
}
"""Modules of the classes that are imported on first use: runs without trials need none of them."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"lagom.config.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'lagom.config' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]  # for completion, also before the first use
