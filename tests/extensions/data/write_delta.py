"""Write ``tests/extensions/data/delta_1_6``: to be run with deltalake 1.6, for a folder that does not exist.

python tests/extensions/data/write_delta.py tests/extensions/data/delta_1_6
"""

from __future__ import annotations

import sys

import pyarrow as pa


def main(folder: str) -> None:
    """Write a Delta table of rows 0 to 29, partitioned by kind and number, with deletes and a checkpoint in between."""
    from deltalake import DeltaTable, write_deltalake

    def rows(start: int, stop: int) -> pa.Table:
        ids = list(range(start, stop))
        kinds = [None if n % 5 == 4 else f"k {n % 2}" for n in ids]
        return pa.table({"id": ids, "x": [n / 4 for n in ids], "kind": kinds, "number": [str(n % 2) for n in ids]})

    write_deltalake(folder, rows(0, 10), partition_by=["kind", "number"])
    write_deltalake(folder, rows(10, 20), mode="append")
    DeltaTable(folder).delete("id >= 5 and id < 15")
    DeltaTable(folder).create_checkpoint()
    write_deltalake(folder, rows(20, 30), mode="append")
    DeltaTable(folder).delete("kind = 'k 1'")


if __name__ == "__main__":
    main(sys.argv[1])
