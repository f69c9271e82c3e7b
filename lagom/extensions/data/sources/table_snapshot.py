"""``TableSnapshot``: what the log of a Delta table, or the metadata of an Iceberg table, says of one version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.unischema import UnischemaField
    from lagom.extensions.data.sources.mapped_columns import MappedColumns


Files: TypeAlias = "list[tuple[str, int, tuple[tuple[str, str | None], ...]]]"


@dataclass(frozen=True)
class TableSnapshot:
    """One version of a Delta or Iceberg table."""

    format: str
    """Spark's name of the format: "delta" or "iceberg"."""
    files: Files
    """Path below the folder, size in bytes and partition of each current file."""
    kinds: Mapping[str, UnischemaField]
    """Types of the partition columns, whose values are not in the files."""
    types: Mapping[str, Any]
    """Arrow's types of all columns."""
    mapped: MappedColumns | None
    """Finds the columns in the files, if these have other names for them."""
    deleted: Mapping[str, NDArray[np.int64]]
    """Deleted rows, in order, of each file that has some, by its path below the folder."""
