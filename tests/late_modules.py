"""``LateModule``: a module that only some tests need, imported when the first of them looks into it."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any


class LateModule:
    """Stands for a module until it is imported, and then for its contents.

    Each process of tests imports all files of tests, and every rank is a fork of one: what takes seconds to import,
    like MLflow, makes all of them slower.

    Args:
        parts: modules below it that are imported along with it.
    """

    def __init__(self, name: str, *parts: str) -> None:
        self._names = [name, *(f"{name}.{part}" for part in parts)]
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for these in all that a file of tests names
            raise AttributeError(name)
        return getattr(self.imported(), name)

    def imported(self) -> Any:
        """Return the module itself; import it without its warnings where nobody has yet."""
        if self._module is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._module, *_ = [importlib.import_module(name) for name in self._names]
        return self._module


os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
mlflow: Any = LateModule(
    "mlflow", "entities", "exceptions", "store.model_registry.sqlalchemy_store", "store.tracking.sqlalchemy_store"
)
