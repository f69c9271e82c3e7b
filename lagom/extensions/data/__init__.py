"""Parquet tables as data sets of torch, shuffled at the speed of the disk.

With ``batches="split"`` or "per_rank", training rows are split evenly over ranks; with "whole" each rank gets all rows.

Start with ``parquet/dataset.py``; which types of columns become tensors: ``column_types/types.py``; Spark DataFrames:
``dataframes.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lagom.extension import Extension

if TYPE_CHECKING:
    from lagom.driver.driver_run import DriverRun
    from lagom.extensions.data.parquet.dataset import ParquetDataset
    from lagom.extensions.data.parquet.parquet_loader import ParquetLoader
    from lagom.extensions.data.parquet.petastorm_loader import PetastormDataLoader, TransformSpec
    from lagom.plan import Plan

__all__ = ["ParquetDataset", "ParquetLoader", "PetastormDataLoader", "TransformSpec"]

_HOMES = {
    "ParquetDataset": "lagom.extensions.data.parquet.dataset",
    "ParquetLoader": "lagom.extensions.data.parquet.parquet_loader",
    "PetastormDataLoader": "lagom.extensions.data.parquet.petastorm_loader",
    "TransformSpec": "lagom.extensions.data.parquet.petastorm_loader",
}


def __getattr__(name: str) -> Any:
    # Import on first use, since a driver that only names a data set must not import torch for it.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lagom.data' has no attribute {name!r}")


class Data(Extension):
    """Data sets and loaders for tables, which a program names itself, and DataFrames of Spark in a config."""

    name = "data"

    def provided(self, provided: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ``Extension``."""
        from lagom.extensions.data.dataframes import write_frame

        return write_frame(provided)

    def is_wanted(self, plan: Plan) -> bool:
        """Return True: only the arguments show whether a run has a DataFrame."""
        return True

    def driver(self, run: DriverRun) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.data.dataframes import frames_of_run

        return frames_of_run(run.call.provided, run.snapshots)
