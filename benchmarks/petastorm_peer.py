"""Reads and writes with petastorm 0.12.1, in an environment of its own; ``benchmarks.parquet`` starts this script."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES = ["thread 1", "thread 2", "process 2"]
"""Reader pools for tables that petastorm reads by row group."""
ROWS = ["thread 1", "thread 2", "process 2"]
"""Reader pools for tables that petastorm decodes row by row.

BatchedDataLoader is not used for them: it makes a tensor of each row, and is 20 times slower.
"""


def main(argv: list[str]) -> None:
    """Run one command, and print its result as JSON.

    The commands are ``list TABLE``, ``write FOLDER TABLE COUNT``, and
    ``read NAME FOLDER TABLE BATCH WINDOW ROWS ROW_BYTES``.
    """
    command, *rest = argv
    if command != "list":
        _make_importable()
    if command == "list":
        pools = ROWS if rest[0] in ("arrays", "images") else BATCHES
        print(json.dumps([f"{pool}, {kind}" for kind in ("in order", "shuffled") for pool in pools]))
    elif command == "write":
        write(rest[0], rest[1], int(rest[2]))
    else:
        from benchmarks.rates import rate

        name, folder, table, *numbers = rest
        batch, window, num_rows, row_bytes = map(int, numbers)
        found = rate(read(name, folder, table, batch, min(window, num_rows)), num_rows, row_bytes)
        print(json.dumps(found._asdict()))


def _make_importable() -> None:
    """Make petastorm importable beside a pyarrow that is newer than petastorm supports."""
    import pyarrow as pa

    if int(pa.__version__.split(".")[0]) >= 16:
        import lagom.extensions.compat.petastorm  # noqa: F401


def read(name: str, folder: str, table: str, batch: int, window: int) -> Iterator[int]:
    """Read passes without end with configuration ``name``, and yield the number of rows of each batch.

    Args:
        window: rows in petastorm's shuffling queue.
    """
    from petastorm import make_batch_reader, make_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    parts = name.split(", ")
    pool, workers = parts[0].split()
    is_shuffled = parts[-1] == "shuffled"
    make, load = (make_reader, DataLoader) if table in ("arrays", "images") else (make_batch_reader, BatchedDataLoader)
    options = {"reader_pool_type": pool, "workers_count": int(workers), "shuffle_row_groups": is_shuffled}
    with make(f"file://{folder}", num_epochs=None, **options) as reader:
        for found in load(reader, batch_size=batch, shuffling_queue_capacity=window if is_shuffled else 0):
            yield len(next(iter(found.values())))


def write(folder: str, table: str, count: int) -> None:
    """Write arrays, or photos as PNGs, in 4 files of 8 row groups."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from petastorm.codecs import CompressedImageCodec, NdarrayCodec
    from petastorm.unischema import Unischema, UnischemaField

    codec: Any = NdarrayCodec() if table == "arrays" else CompressedImageCodec("png")
    shape = (3, 32, 32) if table == "arrays" else (224, 224, 3)
    field = UnischemaField("x", np.uint8, shape, codec, False)
    random = np.random.default_rng(0)
    groups = {}
    for part in range(4):
        cells = []
        for _ in range(part * count // 4, (part + 1) * count // 4):
            value = smooth(random, shape) if table == "arrays" else photo(random, shape)
            cells.append(bytes(codec.encode(field, value)))
        data = pa.table({"x": pa.array(cells, pa.binary())})
        pq.write_table(data, f"{folder}/part-{part}.parquet", row_group_size=-(-count // 32))
        groups[f"part-{part}.parquet"] = pq.ParquetFile(f"{folder}/part-{part}.parquet").num_row_groups
    told = {
        b"dataset-toolkit.unischema.v1": pickle.dumps(Unischema("Images", [field])),
        b"dataset-toolkit.num_row_groups_per_file.v1": json.dumps(groups).encode(),
    }
    pq.write_metadata(data.schema.with_metadata(told), f"{folder}/_common_metadata")


def smooth(random: Any, shape: tuple[int, ...]) -> Any:
    """Return a random array with smooth gradients, since pure noise would not compress."""
    import numpy as np

    channels, height, width = shape
    grid = np.add.outer(np.arange(height), np.arange(width)) * 4
    planes = [grid * slope + random.integers(0, 9) for slope in random.random(channels)]
    return (np.stack(planes) % 256).astype(np.uint8)


def photo(random: Any, shape: tuple[int, ...]) -> Any:
    """Return a random image of large shapes and noise; a PNG of it has 0.6 of its bytes, as of a photo."""
    import cv2
    import numpy as np

    height, width, channels = shape
    large = cv2.resize(random.integers(0, 256, (8, 8, channels)).astype(np.float32), (width, height))
    return np.clip(large + 4 * random.standard_normal(shape), 0, 255).astype(np.uint8)


if __name__ == "__main__":
    main(sys.argv[1:])
