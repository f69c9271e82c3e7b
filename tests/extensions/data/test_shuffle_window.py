"""``lagom.extensions.data.parquet.shuffle_window``: rows come whole out of a round, however wide their columns are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lagom.data import ParquetDataset, ParquetLoader
from lagom.extensions.data.column_types.reused_arrays import ReusedArrays
from lagom.extensions.data.column_types.values import Dense
from lagom.extensions.data.parquet.shuffle_window import ShuffleWindow

ROWS = 3000


def test_wide_narrow_and_text_columns_stay_together(tmp_path: Path) -> None:
    """Wide ones are put in place as they are decoded, numbers gathered, texts taken."""
    number = np.arange(ROWS)
    wide = (number[:, None] * 100 + np.arange(64)).astype(np.float32)
    table = pa.table(
        {
            "number": number,
            "wide": pa.FixedSizeListArray.from_arrays(wide.ravel(), 64),
            "text": [str(one) for one in number],
            "lists": pa.array([[float(one)] * 20 for one in number]),
        }
    )
    for part in range(3):
        pq.write_table(table.slice(part * 1000, 1000), tmp_path / f"part-{part}.parquet", row_group_size=130)
    dataset = ParquetDataset(tmp_path, window_bytes=400_000, streams=3)
    kept = []
    for _ in range(2):
        seen = []
        for batch in ParquetLoader(dataset, 64, shuffle=True, seed=1):
            seen.append(batch["number"])
            torch.testing.assert_close(batch["wide"], torch.from_numpy(wide[batch["number"].numpy()]), rtol=0, atol=0)
            torch.testing.assert_close(batch["lists"], batch["number"].double()[:, None].expand(-1, 20))
            assert batch["text"] == [str(one) for one in batch["number"].tolist()]
            batch["wide"].zero_()  # the program's own
            kept.append(batch)
        assert sorted(torch.cat(seen).tolist()) == number.tolist()
    assert all(not batch["wide"].any() for batch in kept)  # nobody else has that memory
    dataset.close()


def test_rows_that_lie_apart_are_put_in_place() -> None:
    """Cells that are views of Arrow's memory have gaps, since each follows a header."""
    read = np.arange(6 * 200, dtype=np.uint8).reshape(6, 200)
    made = ShuffleWindow(np.array([5, 0, 3, 1, 4, 2]), ReusedArrays())
    for first in (4, 0, 2):
        assert made.put({("x",): Dense(read[first : first + 2, 8:].reshape(2, 3, 64))}, first) == {}
    with ThreadPoolExecutor(1) as pool:
        found = made.block([("x",)], [{}], pool)["x",].array
    assert found.tobytes() == read[[5, 0, 3, 1, 4, 2], 8:].tobytes()
    assert found.flags.writeable
