"""Data sets in petastorm's format, written with the real petastorm's schema, codecs and metadata, without Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def schema() -> Any:
    """Numbers, and arrays of shape (2, 3)."""
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql.types import LongType

    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("image", np.float64, (2, 3), NdarrayCodec(), False),
    ]
    return Unischema("Rows", fields)


def image(number: int) -> Any:
    """Return the image in row ``number``."""
    return np.sin(np.arange(6.0) + number).reshape(2, 3)


def write(folder: Path, layout: Sequence[Sequence[int]]) -> Path:
    """Rows 0, 1, 2, ...; ``layout`` is the rows of each row group, by file."""
    from petastorm.etl.dataset_metadata import ROW_GROUPS_PER_FILE_KEY, UNISCHEMA_KEY

    folder.mkdir(parents=True)
    made = schema()
    codec = made.fields["image"].codec
    arrow = pa.schema([("id", pa.int64()), ("image", pa.binary())])
    start, groups = 0, {}
    for number, counts in enumerate(layout):
        name = f"part-{number:03}.parquet"
        groups[name] = len(counts)
        with pq.ParquetWriter(folder / name, arrow) as writer:
            for count in counts:
                ids = range(start, start + count)
                cells = [bytes(codec.encode(made.fields["image"], image(one))) for one in ids]
                writer.write_table(pa.table({"id": list(ids), "image": cells}, arrow))
                start += count
    import pickle

    told = {UNISCHEMA_KEY: pickle.dumps(made), ROW_GROUPS_PER_FILE_KEY: json.dumps(groups).encode()}
    pq.write_metadata(arrow.with_metadata(told), folder / "_common_metadata")
    return folder
