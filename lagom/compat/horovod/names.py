"""The modules that programs import, by Horovod's names and Databricks', and what is served under each."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

VERSION = "0.28.1"
"""Of Horovod, whose names and numbers are served."""
_OWN = "lagom.compat.horovod"
ALIASES = {
    "horovod.torch": f"{_OWN}.torch",
    "horovod.torch.compression": f"{_OWN}.compression",
    "horovod.torch.elastic": f"{_OWN}.elastic",
    "horovod.torch.elastic.sampler": f"{_OWN}.elastic",
    "horovod.torch.elastic.state": f"{_OWN}.elastic",
    "horovod.torch.functions": f"{_OWN}.broadcasting",
    "horovod.torch.mpi_ops": f"{_OWN}.torch",
    "horovod.torch.optimizer": f"{_OWN}.optimizer",
    "horovod.torch.sync_batch_norm": f"{_OWN}.batchnorm",
    "horovod.common.elastic": f"{_OWN}.elastic",
    "horovod.common.exceptions": f"{_OWN}.errors",
    "horovod.common.process_sets": f"{_OWN}.process_sets",
    "sparkdl.horovod": f"{_OWN}.logging",
}
"""Modules that are others of lagom's, by the same object."""
_PACKAGES: dict[str, dict[str, str]] = {
    "horovod": {"run": "local_run"},
    "horovod.common": {},
    "horovod.runner": {"run": "local_run"},
    "horovod.spark": {"run": "run"},
    "sparkdl": {"HorovodRunner": "HorovodRunner"},
}
"""Modules that are made, with what is in them: names of ``runner``."""
PATH = "served by lagom.compat.horovod"
"""In place of a folder of submodules: who looks there is asking for these."""
INSTEAD = {
    "horovod.common.util": "import what you need from horovod.torch",
    "horovod.tensorflow": "lagom runs PyTorch programs only; use tf.distribute",
    "horovod.keras": "lagom runs PyTorch programs only; use tf.distribute",
    "horovod.mxnet": "lagom runs PyTorch programs only",
    "horovod.ray": "run the function by lagom.experiment.lagom, on Spark or on this machine",
    "horovod.spark.keras": "lagom runs PyTorch programs only; use tf.distribute",
    "horovod.spark.lightning": "call the training loop in a function, by horovod.spark.run",
    "horovod.spark.torch": "give a DataFrame as train_set= to lagom.experiment.lagom, with an ordinary training loop",
    "horovod.spark.common": "give a DataFrame as train_set= to lagom.experiment.lagom, with an ordinary training loop",
    "horovod.data": "use torch.utils.data.DataLoader",
}
"""What is not served, and what to use."""
TOPS = ("horovod", "sparkdl")


def is_served(name: str) -> bool:
    """Whether there is such a module."""
    return name in ALIASES or name in _PACKAGES


def made(module: ModuleType) -> None:
    """Fill one of the modules that are made."""
    name = module.__name__
    vars(module)["__version__"] = VERSION
    wanted = _PACKAGES[name]

    def find(asked: str) -> Any:
        if asked in wanted:
            # When it is first asked for: the driver of a Spark program need not have torch loaded.
            from lagom.compat.horovod import runner

            return getattr(runner, wanted[asked])
        if asked.startswith("__"):
            raise AttributeError(asked)
        instead = INSTEAD.get(f"{name}.{asked}") or _INSTEAD_OF_NAMES.get(asked, "docs/horovod.md lists what is")
        raise AttributeError(f"{name}.{asked} is not served by lagom; {instead}")

    vars(module)["__getattr__"] = find


_INSTEAD_OF_NAMES = {
    "run_elastic": "a run keeps its ranks: use run()",
    "TorchEstimator": INSTEAD["horovod.spark.torch"],
    "KerasEstimator": INSTEAD["horovod.spark.keras"],
    "TorchBackend": "use horovod.spark.run",
}


def forget() -> None:
    """Take what is served out of ``sys.modules``; who has imported it keeps it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in TOPS and (
            module.__name__.startswith(_OWN) or PATH in vars(module).get("__path__", ())
        ):
            del sys.modules[name]
