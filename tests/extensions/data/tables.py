"""Parquet files for tests, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def numbers(folder: Path, layout: list[list[int]]) -> Path:
    """Rows 0, 1, 2, ... in column ``row``, and two floats that follow from it; ``layout`` is row groups by file."""
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    schema = pa.schema([("row", pa.int64()), ("x", pa.float64()), ("y", pa.float64())])
    for number, groups in enumerate(layout):
        with pq.ParquetWriter(folder / f"part-{number:03}.parquet", schema) as writer:
            for count in groups:
                row = np.arange(start, start + count)
                writer.write_table(
                    pa.table({"row": row, "x": np.sin(row), "y": np.cos(3.0 * row)}, schema),
                    row_group_size=max(count, 1),
                )
                start += count
    return folder


def written(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    """A folder with one file of ``columns``."""
    folder.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, folder / "part-0.parquet", **options)
    return folder
