"""``data.column_types.common_types``: a column whose files have several of Arrow's types is read as one type."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError

TEXTS, BYTES = pa.array(["a", "b"]), pa.array([b"a", b"b"])


def written(folder: Path, *columns: Any) -> Path:
    """A data set with a file for each of ``columns``."""
    for number, column in enumerate(columns):
        table = pa.table({"x": column, "n": [2 * number, 2 * number + 1]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=1)
    return folder


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TEXTS, TEXTS.cast(pa.string_view())),
        (TEXTS.cast(pa.string_view()), TEXTS.cast(pa.string_view())),
        (TEXTS.cast(pa.large_string()), TEXTS),
        (TEXTS.dictionary_encode(), TEXTS.cast(pa.string_view())),
        (BYTES.cast(pa.binary_view()), BYTES),
        (BYTES, BYTES.cast(pa.large_binary())),
        (pa.array([1, 2], pa.int32()), pa.array([1, 1 << 40])),
        (pa.array([1, 2]), pa.array([1, 2], pa.int8())),
        (pa.array([1, 2], pa.float32()), pa.array([1, 0.1])),
        (pa.array([1, 2], pa.int16()), pa.array([1, 0.1])),
        (pa.array([1, 2], pa.int32()), pa.array([Decimal(1), Decimal("0.1")], pa.decimal128(12, 2))),
        (pa.array([1, 2], pa.decimal128(5, 1)), pa.array([1, 2], pa.decimal128(7, 2))),
        (pa.array([[1], [2]], pa.list_(pa.int32())), pa.array([[1], [2]], pa.large_list(pa.int64()))),
    ],
    ids=lambda column: str(column.type),
)
def test_values_are_those_of_the_files_also_filtered_and_shuffled(first: Any, second: Any, tmp_path: Path) -> None:
    folder = written(tmp_path, first, second)
    wanted = [float(v) if isinstance(v, Decimal) else v for v in (*first.to_pylist(), *second.to_pylist())]
    (found,) = ParquetLoader(ParquetDataset(folder), 9)
    assert listed(found["x"]) == wanted
    shuffled = {int(b["n"]): listed(b["x"])[0] for b in ParquetLoader(ParquetDataset(folder), 1, shuffle=True)}
    assert shuffled == dict(enumerate(wanted))
    if not isinstance(wanted[0], list):
        some = ParquetDataset(folder, filters=[("x", "=", second[0].as_py())])
        (found,) = ParquetLoader(some, 9)
        assert found["n"].tolist() == [n for n, value in enumerate(wanted) if value == wanted[0]]
        assert len(some) == len(found["n"])


def listed(column: Any) -> Any:
    return column.tolist() if isinstance(column, torch.Tensor) else column


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1, 2]), pa.array([1, 0.5])),
        (pa.array([1, 2], pa.int32()), pa.array([1, 0.5], pa.float32())),
        (pa.array([1, 2], pa.uint32()), pa.array([1, 2])),
        (pa.array([1, 2]), pa.array([1, 2], pa.decimal128(12, 2))),
        (pa.array([1, 2], pa.decimal128(5, 1)), pa.array([1, 2], pa.decimal128(5, 2))),
        (pa.array([1, 2], pa.timestamp("us")), pa.array([1, 2], pa.timestamp("ms"))),
        (TEXTS, BYTES),
    ],
    ids=lambda column: str(column.type),
)
def test_types_that_no_type_holds_without_loss_are_an_error(first: Any, second: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'x' is .* in .*0.parquet and .* in .*1.parquet"):
        ParquetDataset(written(tmp_path, first, second))
