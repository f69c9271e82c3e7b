"""Files that were written over, and bytes that have flipped, are errors and no other numbers."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError
from lagom.extensions.data.sources import file_versions
from lagom.extensions.data.sources.file_versions import FileVersions


def _write(folder: Path, number: int, first: int, **options: Any) -> int:
    """File ``number``, of 1,000 rows from ``first`` on, which takes the same bytes whatever these are."""
    path = folder / f"part-{number}.parquet"
    table = pa.table({"row": np.arange(first, first + 1000)})
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, **options}
    pq.write_table(table, path, row_group_size=100, **options)
    os.utime(path, ns=(first, first))  # a file system may keep time by the second only
    return path.stat().st_size


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_that_is_written_over_in_mid_epoch_with_as_many_bytes_is_an_error(tmp_path: Path, shuffle: bool) -> None:
    sizes = {_write(tmp_path, number, 1000 * number) for number in range(4)}
    loader = ParquetLoader(ParquetDataset(str(tmp_path), window_bytes=800), 10, shuffle, seed=0)
    batches = iter(loader)
    seen = [next(batches)["row"] for _ in range(4)]
    sizes.add(_write(tmp_path, 3, 9000))
    with pytest.raises(DataError, match=r"part-3\.parquet was written again"):
        seen.extend(batch["row"] for batch in batches)
    assert len(sizes) == 1
    assert max(rows.max().item() for rows in seen) < 4000
    assert len(list(ParquetLoader(ParquetDataset(str(tmp_path)), 10))) == 400


def test_a_bit_that_has_flipped_in_a_page_is_an_error_where_there_are_checksums(tmp_path: Path) -> None:
    _write(tmp_path, 0, 0, write_page_checksum=True)
    path = tmp_path / "part-0.parquet"
    content = bytearray(path.read_bytes())
    content[content.index(np.int64(345).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"part-0\.parquet, row group 3, cannot be read.*checksum"):
        list(ParquetLoader(ParquetDataset(str(tmp_path)), 10))


def test_times_of_files_travel_on_their_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, home = tmp_path / "file", fs.LocalFileSystem()
    path.touch()
    kept = FileVersions()
    kept.check(home, str(path))
    packed = pickle.dumps(kept)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="was written again"):
        pickle.loads(packed).check(home, str(path))
    monkeypatch.setattr(file_versions, "boot_id", lambda: "another host")
    elsewhere = pickle.loads(packed)
    elsewhere.check(home, str(path))
    os.utime(path, ns=(2, 2))
    with pytest.raises(DataError, match="was written again"):
        elsewhere.check(home, str(path))
