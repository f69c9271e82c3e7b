"""lagom: runs an ordinary PyTorch training function, unchanged, on the executors of Spark or on this machine."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lagom import config, experiment
    from lagom.config import TorchDistributedConfig
    from lagom.errors import LagomError
    from lagom.extensions.data.parquet.petastorm_loader import PetastormDataLoader
    from lagom.extensions.scoring.predictor import Predictor
    from lagom.extensions.zero.memory_plan.memory_planner import plan_memory
    from lagom.extensions.zero.memory_plan.needs import MemoryPlan
    from lagom.result import Result, show
    from lagom.world import rank, world_size

__version__ = "0.1.0"
__all__ = [
    "LagomError",
    "MemoryPlan",
    "PetastormDataLoader",
    "Predictor",
    "Result",
    "TorchDistributedConfig",
    "config",
    "experiment",
    "plan_memory",
    "rank",
    "show",
    "world_size",
]

_HOMES = {
    "LagomError": "lagom.errors",
    "MemoryPlan": "lagom.extensions.zero.memory_plan.needs",
    "PetastormDataLoader": "lagom.extensions.data.parquet.petastorm_loader",
    "Predictor": "lagom.extensions.scoring.predictor",
    "Result": "lagom.result",
    "TorchDistributedConfig": "lagom.config",
    "plan_memory": "lagom.extensions.zero.memory_plan.memory_planner",
    "rank": "lagom.world",
    "show": "lagom.result",
    "world_size": "lagom.world",
}


class _DefaultHandler(logging.Handler):
    """Writes lagom's warnings to standard error, after ``lagom:``, unless the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"lagom: {self.format(record)}\n")


logging.getLogger(__name__).addHandler(_DefaultHandler(logging.WARNING))


def __getattr__(name: str) -> Any:
    # Import on first use: a driver that launches on Spark must not load modules that only ranks need.
    if name in ("config", "experiment"):
        return importlib.import_module(f"lagom.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    import difflib

    near = difflib.get_close_matches(name, __all__, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module 'lagom' has no attribute {name!r}{hint}")
