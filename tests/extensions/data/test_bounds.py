"""Limits of reading: bytes from storage over all ranks, and memory in each rank."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lagom.data import ParquetDataset, ParquetLoader
from lagom.session.session import Session
from tests.extensions.data.object_store import object_store
from tests.ranks import run_ranks

ROWS = 120_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 columns of noise, 15 MB in 3 files of 16 row groups."""
    made = tmp_path_factory.mktemp("bounds")
    (made / "table").mkdir()
    random = np.random.default_rng(0)
    for part in range(3):
        columns = {f"c{n}": random.standard_normal(ROWS // 3) for n in range(16)}
        path = made / "table" / f"part-{part}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=ROWS // 48)
    return made


# Two share the reading.
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4))])
def test_shuffled_ranks_read_together_about_what_there_is(folder: Path, world_size: int) -> None:
    size = sum(path.stat().st_size for path in (folder / "table").iterdir())
    with object_store(folder) as store:

        def run(session: Session) -> int:
            dataset = ParquetDataset(store.url("table"), window_bytes=8 << 20)
            count = sum(len(batch["c0"]) for batch in ParquetLoader(dataset, 512, shuffle=True))
            dataset.close()
            return count

        assert sum(run_ranks(world_size, run)) == ROWS
        assert store.num_bytes <= 1.3 * size


@pytest.mark.soak
def test_a_process_needs_the_window_and_what_allocators_keep(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    random = np.random.default_rng(0)
    for part in range(4):  # 96 MB
        columns = {f"c{n}": random.standard_normal(300_000).astype(np.float32) for n in range(20)}
        pq.write_table(pa.table(columns), wide / f"part-{part}.parquet", row_group_size=37_500)
    del columns

    def run(session: Session) -> int:
        list(ParquetLoader(ParquetDataset(tmp_path / "wide" / "part-0.parquet", columns=["c0"]), 1 << 20))
        gc.collect()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        for _ in ParquetLoader(ParquetDataset(wide, window_bytes=128 << 20), 1024, shuffle=True):
            pass
        return memory("VmHWM") - before

    (grown,) = run_ranks(1, run)
    assert grown <= 128 + 40  # 115 here; where Arrow decodes 183


def memory(name: str) -> int:
    """Return the memory of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) >> 10


def test_a_window_that_cannot_hold_what_is_being_decoded_is_warned_of(folder: Path) -> None:
    dataset = ParquetDataset(folder / "table", window_bytes=1 << 20, streams=400)
    with pytest.warns(UserWarning, match=r"window_bytes is 1 MB, and to decode 400 row groups .* streams="):
        ParquetLoader(dataset, 10, shuffle=True)
    ParquetLoader(dataset, 10)  # one at a time
