"""``maggy.core.patching``: Maggy's loaders, as lagom's and torch's own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lagom import PetastormDataLoader

__all__ = ["MaggyDataLoader", "MaggyPetastormDataLoader"]


class MaggyDataLoader(DataLoader[Any]):
    """torch's own: within a run it is dealt out as any other."""


class MaggyPetastormDataLoader(PetastormDataLoader):
    """Batches of the data set at ``dataset``, which petastorm or Spark wrote; within a run each rank's own.

    Args:
        dataset: as all others, as for ``lagom.PetastormDataLoader``.
    """

    def __init__(self, dataset: Any, batch_size: int = 1, transform_spec: Any = None, **options: Any) -> None:
        super().__init__(dataset, batch_size, transform_spec, **options)


def __getattr__(name: str) -> Any:
    if name.startswith(("get_maggy_", "MaggyZero")):
        raise NotImplementedError(
            f"maggy.core.patching.{name} is a wrapper that Maggy put around modules and optimizers; lagom leaves them "
            "as they are. Use the module or the optimizer itself, and zero_lvl= in the config"
        )
    raise AttributeError(f"module 'maggy.core.patching' has no attribute {name!r}")
