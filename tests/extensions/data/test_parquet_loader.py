"""``ParquetLoader``'s iterator, and row groups that several threads decode."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError
from lagom.extensions.data.parquet import streams
from lagom.patching.replace import replaced
from tests.extensions.data.tables import numbers


def test_a_profiler_sees_batches(tmp_path: Path) -> None:
    loader = ParquetLoader(numbers(tmp_path, [[6]]), 2)
    with torch.profiler.profile() as profile:
        assert len(list(loader)) == 3
    names = [event.name for event in profile.events() or []]
    assert sum(name.startswith("enumerate(DataLoader)") for name in names) >= 3


def test_who_stands_in_for_torchs_iterator_is_asked_for_each_batch(tmp_path: Path) -> None:
    loader = ParquetLoader(numbers(tmp_path, [[6]]), 2)
    original = _BaseDataLoaderIter.__next__
    asked = []

    def following(self: Any) -> Any:
        asked.append(self)
        return original(self)

    with replaced(_BaseDataLoaderIter, "__next__", following):
        assert len(list(loader)) == 3
    assert len(asked) == 4
    assert len(list(loader)) == 3
    assert len(asked) == 4


@pytest.mark.parametrize("num_columns", [1, 5])
def test_row_groups_that_threads_decode_come_in_order_and_so_does_an_error(
    tmp_path: Path, num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    pools: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads: int) -> None:
            pools.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(streams, "ThreadPoolExecutor", Pool)
    count, size = 40, 7
    for part in range(2):
        rows = pa.array(range(part * count, (part + 1) * count))
        table = pa.table({f"c{n}": rows for n in range(num_columns)})
        pq.write_table(table, tmp_path / f"part-{part}.parquet", row_group_size=size)
    dataset = ParquetDataset(tmp_path)
    loader = ParquetLoader(dataset, 3)
    assert torch.cat([batch["c0"] for batch in loader]).tolist() == list(range(2 * count))
    assert pools == [3]

    path = tmp_path / "part-1.parquet"
    place = pq.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset
    content, times = bytearray(path.read_bytes()), path.stat()
    content[place : place + 20] = b"\xff" * 20
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does that forgets
    seen: list[int] = []

    def read() -> None:
        for batch in loader:
            seen.extend(batch["c0"].tolist())

    with pytest.raises(DataError, match=r"part-1.parquet, row group 3"):
        read()
    # What lies before is not lost, but for the batch that the error is in.
    assert seen == list(range(len(seen)))
    assert len(seen) >= count + 3 * size - 3
    dataset.close()
    gc.collect()  # the error, by its traceback, had what was open
    held = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)]
    assert not [one for one in held if one.startswith(str(tmp_path))]


def _is_open(number: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{number}")  # that of the listing itself is gone
