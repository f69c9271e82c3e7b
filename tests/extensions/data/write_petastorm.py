"""Writes ``petastorm_0_12_1`` beside it: run with petastorm 0.12.1, pyarrow 14 and numpy 1.26, in a folder to be made.

python tests/extensions/data/write_petastorm.py tests/extensions/data/petastorm_0_12_1
"""

from __future__ import annotations

import decimal
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def schema() -> Any:
    """The schema of the data set."""
    from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql import types as t

    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(t.LongType()), False),
        UnischemaField("small", np.uint8, (), ScalarCodec(t.IntegerType()), False),
        UnischemaField("name", np.str_, (), ScalarCodec(t.StringType()), True),
        UnischemaField("price", decimal.Decimal, (), ScalarCodec(t.DecimalType(10, 2)), False),
        UnischemaField("fixed", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("ragged", np.int16, (None, 2), NdarrayCodec(), False),
        UnischemaField("zipped", np.float64, (3,), CompressedNdarrayCodec(), False),
        UnischemaField("maybe", np.float32, (2,), NdarrayCodec(), True),
        UnischemaField("png", np.uint8, (4, 5, 3), CompressedImageCodec("png"), False),
        UnischemaField("grey", np.uint16, (4, 5), CompressedImageCodec("png"), False),
        UnischemaField("jpeg", np.uint8, (16, 16, 3), CompressedImageCodec("jpeg", 95), False),
        UnischemaField("day", np.str_, (), ScalarCodec(t.StringType()), False),
    ]
    return Unischema("Rows", fields)


def row(number: int) -> dict[str, Any]:
    """Return row ``number``."""
    random = np.random.RandomState(number)
    return {
        "id": number,
        "small": number % 256,
        "name": None if number % 5 == 4 else f"name {number}",
        "price": decimal.Decimal(number) / 4,
        "fixed": random.rand(2, 3).astype(np.float32),
        "ragged": random.randint(-99, 99, (number % 3 + 1, 2)).astype(np.int16),
        "zipped": random.rand(3),
        "maybe": None if number % 4 == 3 else random.rand(2).astype(np.float32),
        "png": random.randint(0, 255, (4, 5, 3)).astype(np.uint8),
        "grey": random.randint(0, 65535, (4, 5)).astype(np.uint16),
        "jpeg": np.full((16, 16, 3), (200, 100, number), np.uint8),
        "day": str(number // 10),
    }


def main(folder: Path) -> None:
    """Write 20 rows, in a folder for each ten."""
    made = schema()
    fields = made.fields
    for day in (0, 1):
        columns: dict[str, list[object]] = {name: [] for name in fields if name != "day"}
        for number in range(day * 10, day * 10 + 10):
            for name, value in row(number).items():
                if name != "day":
                    encoded = None if value is None else fields[name].codec.encode(fields[name], value)
                    columns[name].append(bytes(encoded) if isinstance(encoded, bytearray) else encoded)
        kinds = {"id": pa.int64(), "small": pa.int32(), "name": pa.string(), "price": pa.decimal128(10, 2)}
        table = pa.table({name: pa.array(cells, kinds.get(name, pa.binary())) for name, cells in columns.items()})
        (folder / f"day={day}").mkdir(parents=True)
        pq.write_table(table, folder / f"day={day}" / "part-0.parquet", row_group_size=4, compression="gzip")
    told = {b"dataset-toolkit.unischema.v1": pickle.dumps(made)}
    pq.write_metadata(table.schema.with_metadata(told), folder / "_common_metadata")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
