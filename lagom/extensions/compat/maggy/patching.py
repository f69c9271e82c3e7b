"""``maggy.core.patching``: Maggy's loaders, as subclasses of torch's and lagom's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lagom import PetastormDataLoader

__all__ = ["MaggyDataLoader", "MaggyPetastormDataLoader"]


class MaggyDataLoader(DataLoader[Any]):
    """torch's loader, which a run shards like any other."""


class MaggyPetastormDataLoader(PetastormDataLoader):
    """Loads batches of a data set that petastorm or Spark wrote; see ``lagom.PetastormDataLoader``."""

    def __init__(self, dataset: Any, batch_size: int = 1, transform_spec: Any = None, **options: Any) -> None:
        super().__init__(dataset, batch_size, transform_spec, **options)


def __getattr__(name: str) -> Any:
    if name.startswith(("get_maggy_", "MaggyZero")):
        raise NotImplementedError(
            f"maggy.core.patching.{name} is a wrapper that Maggy put around modules and optimizers; lagom leaves them "
            "as they are. Use the module or the optimizer itself, and zero_lvl= in the config"
        )
    raise AttributeError(f"module 'maggy.core.patching' has no attribute {name!r}")
