"""Data sets and loaders for Parquet tables: the public names of the extension ``data``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lagom.extensions.data import ParquetDataset, ParquetLoader, PetastormDataLoader, TransformSpec

__all__ = ["ParquetDataset", "ParquetLoader", "PetastormDataLoader", "TransformSpec"]


def __getattr__(name: str) -> Any:
    # Import on first use, since a driver that only names a data set must not import torch for it.
    if name not in __all__:
        raise AttributeError(f"module 'lagom.data' has no attribute {name!r}")
    from lagom.extensions import data

    return getattr(data, name)
