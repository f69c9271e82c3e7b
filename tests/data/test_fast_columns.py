"""``lagom.data.decoders.fast_columns``: numbers in order are what was written, whatever the layout of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lagom.collectives.native import native
from lagom.data import ParquetDataset, ParquetLoader
from lagom.data.parquet import streams
from lagom.errors import DataError

pytestmark = pytest.mark.skipif(native() is None, reason="lagom was built without a compiler")

TYPES = [np.int64, np.float32, np.float64, np.float32, np.int32, np.float32]


def table(count: int, distinct: int = 50) -> dict[str, NDArray[Any]]:
    drawn = np.random.default_rng(count)
    some = [drawn.integers(0, distinct, count) if n % 2 else np.arange(count) * 7 + n for n in range(len(TYPES))]
    return {
        f"c{n}": (some[n] / 8 if dtype in (np.float32, np.float64) else some[n]).astype(dtype)
        for n, dtype in enumerate(TYPES)
    }


def write(folder: Path, columns: dict[str, Any], files: list[list[int]], **options: Any) -> Path:
    """``files``: rows of the row groups of each."""
    folder.mkdir()
    whole = pa.table(columns)
    start = 0
    for number, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"part-{number}.parquet", whole.schema, **options) as writer:
            for count in groups:
                writer.write_table(whole.slice(start, count), row_group_size=max(1, count))
                start += count
    assert start == whole.num_rows
    return folder


def check(batches: list[dict[str, torch.Tensor]], columns: dict[str, NDArray[Any]], size: int, start: int = 0) -> None:
    for number, batch in enumerate(batches):
        first = start + number * size
        assert list(batch) == list(columns)
        for name, values in batch.items():
            wanted = columns[name][first : first + size]
            assert values.numpy().dtype == wanted.dtype
            assert values.numpy().tobytes() == wanted.tobytes()
    assert start + sum(len(batch["c0"]) for batch in batches) == len(columns["c0"])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_batches_of_any_layout_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    files = draw(st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=4), min_size=1, max_size=3))
    files[0][0] += 1
    columns = table(sum(map(sum, files)), draw(st.sampled_from([1, 3, 50])))
    folder = write(
        tmp_path_factory.mktemp("tables") / "table",
        columns,
        files,
        compression=draw(st.sampled_from(["none", "snappy"])),
        data_page_size=draw(st.sampled_from([1, 100, 1 << 20])),
        write_batch_size=draw(st.sampled_from([3, 1024])),
        dictionary_pagesize_limit=draw(st.sampled_from([1, 100, 1 << 20])),
    )
    size = draw(st.integers(1, 40))
    dataset = ParquetDataset(folder, window_bytes=draw(st.sampled_from([20_000, 1 << 20])))
    loader = ParquetLoader(dataset, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "MOST", draw(st.sampled_from([25, 1 << 16])))
        check(list(loader), columns, size)
    check(list(loader), columns, size)  # in memory that is used again
    used = draw(st.integers(0, sum(map(sum, files)) // size))
    passing = iter(loader)
    for _ in range(used):
        next(passing)
    state = loader.state_dict()
    other = draw(st.integers(1, 40))
    again = ParquetLoader(dataset, other)
    again.load_state_dict(state)
    check(list(again), columns, other, start=state["rows"])
    dataset.close()


def test_a_null_that_comes_late_is_filled_and_what_lies_before_it_is_as_it_was(tmp_path: Path) -> None:
    columns: dict[str, Any] = table(400)
    nullable = dict(columns, c3=pa.array(columns["c3"], mask=np.arange(400) == 333))
    options: dict[str, Any] = {"data_page_size": 40, "write_batch_size": 4, "use_dictionary": False}
    folder = write(tmp_path / "table", nullable, [[150, 150, 100]], **options)
    columns["c3"] = np.where(np.arange(400) == 333, np.float32(5), columns["c3"])
    check(list(ParquetLoader(ParquetDataset(folder, nulls=5), 10)), columns, 10)
    with pytest.raises(DataError, match=r"part-0.parquet, row group 2, column 'c3', row 33: a null"):
        list(ParquetLoader(folder, 10))
    masked = list(ParquetLoader(ParquetDataset(folder, nulls="mask"), 10))
    assert [batch["c3__valid"].all().item() for batch in masked] == [n != 33 for n in range(40)]


def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "table", table(400), [[150, 250]])
    dataset = ParquetDataset(folder)
    path = folder / "part-0.parquet"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 255
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"part-0.parquet"):
        list(ParquetLoader(dataset, 10))
