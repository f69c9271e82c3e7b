"""The modules of Horovod and sparkdl that lagom serves. See Note [Foreign names]."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from lagom.extensions.compat.served_modules import ServedModules

FORCE = "LAGOM_HOROVOD"
"""Environment variable; see ``ServedModules``."""
VERSION = "0.28.1"
"""Version of Horovod whose names and numbers are served."""
_OWN = "lagom.extensions.compat.horovod"
_ALIASES = {
    "horovod.torch": "torch",
    "horovod.torch.compression": "compression",
    "horovod.torch.elastic": "elastic",
    "horovod.torch.elastic.sampler": "elastic",
    "horovod.torch.elastic.state": "elastic",
    "horovod.torch.functions": "broadcasting",
    "horovod.torch.mpi_ops": "torch",
    "horovod.torch.optimizer": "distributed_optimizer",
    "horovod.torch.sync_batch_norm": "sync_batch_norm",
    "horovod.common.elastic": "elastic",
    "horovod.common.exceptions": "exceptions",
    "horovod.common.process_sets": "process_sets",
}
"""Served modules, each the same object as a module of this package."""
_CREATED: dict[str, dict[str, str]] = {
    "horovod": {"run": "local_run"},
    "horovod.common": {},
    "horovod.runner": {"run": "local_run"},
    "horovod.spark": {"run": "run"},
    "sparkdl": {"HorovodRunner": "HorovodRunner"},
    "sparkdl.horovod": {"log_to_driver": "log_to_driver"},
}
"""Served modules that are created here, with their names and the names of the same objects in ``horovod_runner``."""
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


def _fill_alias(module: ModuleType) -> None:
    sys.modules[module.__name__] = importlib.import_module(f"{_OWN}.{_ALIASES[module.__name__]}")


def _fill_created(module: ModuleType) -> None:
    home = module.__name__
    names = _CREATED[home]

    def find(name: str) -> Any:
        if name in names:
            # Only when it is asked for: the driver of a Spark program need not have torch loaded.
            return getattr(importlib.import_module(f"{_OWN}.horovod_runner"), names[name])
        if name.startswith("__"):
            raise AttributeError(name)
        instead = INSTEAD.get(f"{home}.{name}") or _INSTEAD_OF_NAMES.get(name, "docs/horovod.md lists what is")
        raise AttributeError(f"{home}.{name} is not served by lagom; {instead}")

    vars(module).update(__version__=VERSION, __getattr__=find)


served = ServedModules(
    {**dict.fromkeys(_ALIASES, _fill_alias), **dict.fromkeys(_CREATED, _fill_created)}, INSTEAD, FORCE
)


# Note [Foreign names]
#
# "horovod.torch" and its submodules are the same objects as modules of lagom. So a notebook's function that uses hvd as
# a global is pickled with a reference to lagom.extensions.compat.horovod.torch, which every rank has, whatever is
# installed there.
