"""Finds ``horovod.torch``, ``sparkdl`` and their submodules in lagom. Imports only the standard library.

See Note [Foreign names].
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FORCE = "LAGOM_HOROVOD"
"""Environment variable; "force" serves lagom's modules even where others are installed, on all ranks."""
VERSION = "0.28.1"
"""Version of Horovod whose names and numbers are served."""
PATH = "served by lagom.compat.horovod"
"""Stands in ``__path__`` for a folder of submodules."""
_PACKAGES = ("horovod", "sparkdl")
_OWN = "lagom.compat.horovod"
_ALIASES = {
    "horovod.torch": f"{_OWN}.torch",
    "horovod.torch.compression": f"{_OWN}.compression",
    "horovod.torch.elastic": f"{_OWN}.elastic",
    "horovod.torch.elastic.sampler": f"{_OWN}.elastic",
    "horovod.torch.elastic.state": f"{_OWN}.elastic",
    "horovod.torch.functions": f"{_OWN}.broadcasting",
    "horovod.torch.mpi_ops": f"{_OWN}.torch",
    "horovod.torch.optimizer": f"{_OWN}.distributed_optimizer",
    "horovod.torch.sync_batch_norm": f"{_OWN}.sync_batch_norm",
    "horovod.common.elastic": f"{_OWN}.elastic",
    "horovod.common.exceptions": f"{_OWN}.exceptions",
    "horovod.common.process_sets": f"{_OWN}.process_sets",
}
"""Modules that are modules of lagom, by the same object."""
_CREATED: dict[str, dict[str, str]] = {
    "horovod": {"run": "local_run"},
    "horovod.common": {},
    "horovod.runner": {"run": "local_run"},
    "horovod.spark": {"run": "run"},
    "sparkdl": {"HorovodRunner": "HorovodRunner"},
    "sparkdl.horovod": {"log_to_driver": "log_to_driver"},
}
"""Modules that are created, and for each of their names the one in ``horovod_runner``."""
_INSTEAD_OF_TENSORFLOW = "lagom runs PyTorch programs only; use tf.distribute"
_INSTEAD_OF_ESTIMATORS = "give a DataFrame as train_set= to lagom.experiment.lagom, with an ordinary training loop"
INSTEAD = {
    "horovod.common.util": "import what you need from horovod.torch",
    "horovod.tensorflow": _INSTEAD_OF_TENSORFLOW,
    "horovod.keras": _INSTEAD_OF_TENSORFLOW,
    "horovod.mxnet": "lagom runs PyTorch programs only",
    "horovod.ray": "run the function by lagom.experiment.lagom, on Spark or on this machine",
    "horovod.spark.keras": _INSTEAD_OF_TENSORFLOW,
    "horovod.spark.lightning": "call the training loop in a function, by horovod.spark.run",
    "horovod.spark.torch": _INSTEAD_OF_ESTIMATORS,
    "horovod.spark.common": _INSTEAD_OF_ESTIMATORS,
    "horovod.data": "use torch.utils.data.DataLoader",
}
"""Modules that are not served, and what to use."""
_INSTEAD_OF_NAMES = {
    "run_elastic": "a run keeps its ranks: use run()",
    "TorchEstimator": _INSTEAD_OF_ESTIMATORS,
    "KerasEstimator": _INSTEAD_OF_TENSORFLOW,
    "TorchBackend": "use horovod.spark.run",
}


def install(force: bool = False) -> None:
    """Serve Horovod's names in this process and on the ranks of its runs.

    Args:
        force: also where Horovod is installed; otherwise an installed one is left alone.
    """
    if force:
        os.environ[FORCE] = "force"
    finder = _Finder(force or os.environ.get(FORCE) == "force")
    sys.meta_path[:] = [finder, *_other_finders()]
    importlib.invalidate_caches()


def installed() -> bool:
    """Return whether Horovod's names are served."""
    return len(_other_finders()) < len(sys.meta_path)


def remove() -> None:
    """Undo ``install``. A program that has imported a served module keeps it."""
    if not installed():
        return
    sys.meta_path[:] = _other_finders()
    for name, module in list(sys.modules.items()):
        is_served = module.__name__.startswith(_OWN) or PATH in vars(module).get("__path__", ())
        if name.partition(".")[0] in _PACKAGES and is_served:
            del sys.modules[name]


def _other_finders() -> list[Any]:
    return [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, force: bool) -> None:
        self.force = force

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del target
        if name.partition(".")[0] not in _PACKAGES or (path is not None and list(path) != [PATH]):
            return None
        if name in INSTEAD:
            raise ImportError(f"{name} is not served by lagom; {INSTEAD[name]}", name=name)
        is_served = name in _ALIASES or name in _CREATED
        if not is_served or (path is None and not self.force and _is_elsewhere(name)):
            return None
        spec = importlib.util.spec_from_loader(name, _Loader(), is_package=True)
        assert spec is not None
        spec.submodule_search_locations = [PATH]
        return spec


def _is_elsewhere(name: str) -> bool:
    """Return whether another finder finds the package; a mere folder of that name has no origin."""
    specs = (finder.find_spec(name, None) for finder in _other_finders() if hasattr(finder, "find_spec"))
    return any(spec is not None and spec.origin is not None for spec in specs)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _ALIASES:
            # The import system takes the module that stands here in the end.
            sys.modules[name] = importlib.import_module(_ALIASES[name])
            return

        def find(asked: str) -> Any:
            if asked in _CREATED[name]:
                # Only when it is asked for: the driver of a Spark program need not have torch loaded.
                return getattr(importlib.import_module(f"{_OWN}.horovod_runner"), _CREATED[name][asked])
            if asked.startswith("__"):
                raise AttributeError(asked)
            instead = INSTEAD.get(f"{name}.{asked}") or _INSTEAD_OF_NAMES.get(asked, "docs/horovod.md lists what is")
            raise AttributeError(f"{name}.{asked} is not served by lagom; {instead}")

        vars(module).update(__version__=VERSION, __getattr__=find)


# Note [Foreign names]
#
# "horovod" and "sparkdl" are created modules without a file, so code that looks for files of the program's own, to
# send them along, finds none. "horovod.torch" and its submodules are lagom's own modules, by the same object. So a
# notebook's function that uses hvd as a global is pickled with a reference to lagom.compat.horovod.torch, which every
# rank has, whatever is installed there.
