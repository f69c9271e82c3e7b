"""Names that pyarrow, numpy and Python had when petastorm was written."""

from __future__ import annotations

from typing import Any

from . import legacy
from .finder import view


def old_names(name: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return the old names that petastorm's view of the module ``name`` adds to, or replaces in, ``own``."""
    found: dict[str, Any] = _OLD_NAMES[name]()
    return {key: value for key, value in found.items() if key not in own or key in _REPLACED.get(name, ())}


def _pyarrow() -> dict[str, Any]:
    return {
        "filesystem": view("pyarrow.filesystem"),
        "hdfs": view("pyarrow.hdfs"),
        "parquet": view("pyarrow.parquet"),
        "LocalFileSystem": legacy.local_type(),
        "localfs": legacy.local_type()(),
    }


def _parquet() -> dict[str, Any]:
    kinds = (legacy.ParquetDataset, legacy.ParquetDatasetPiece, legacy.ParquetPartitions, legacy.PartitionSet)
    for kind in kinds:
        # A pickle of an instance names this module, which can be imported wherever petastorm is found by ``finder``.
        kind.__module__ = view("pyarrow.parquet").__name__
    return {kind.__name__: kind for kind in kinds}


def _numpy() -> dict[str, Any]:
    import numpy as np

    return {
        "unicode_": np.str_,
        "string_": np.bytes_,
        "float_": np.float64,
        "in1d": lambda values, among: np.isin(values, among).ravel(),
        "bool": bool,
        "int": int,
        "float": float,
        "object": object,
        "str": str,
    }


def _version() -> dict[str, Any]:
    from packaging.version import Version

    return {"LooseVersion": Version}


_OLD_NAMES = {
    "pyarrow": _pyarrow,
    "pyarrow.parquet": _parquet,
    "pyarrow.filesystem": lambda: {"LocalFileSystem": legacy.local_type()},
    "pyarrow.hdfs": lambda: {"HadoopFileSystem": legacy.HadoopFileSystem, "connect": legacy.connect},
    "numpy": _numpy,
    "distutils": lambda: {"version": view("distutils.version")},
    "distutils.version": _version,
}
_REPLACED = {"pyarrow": ("parquet",), "pyarrow.parquet": ("ParquetDataset",)}
"""Old names that today's module uses for something else."""
