"""What stands for a Spark DataFrame on its way to the ranks, each of which makes a ``ParquetDataset`` of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WrittenFrame:
    """A DataFrame that the cluster has written as Parquet."""

    url: str

    def __call__(self) -> Any:
        """The data set."""
        from lagom.data.parquet.dataset import ParquetDataset

        return ParquetDataset(self.url)


@dataclass(frozen=True, eq=False)
class CollectedFrame:
    """A small DataFrame, whose rows have come to the driver."""

    content: Any
    """The bytes of a Parquet file, as an array: it travels beside the pickle."""
    digest: str

    def __call__(self) -> Any:
        """The data set."""
        from fsspec.implementations.memory import MemoryFileSystem

        from lagom.data.parquet.dataset import ParquetDataset

        path = f"/lagom/{self.digest}/part-0.parquet"
        home = MemoryFileSystem()
        if not home.exists(path):
            home.pipe(path, self.content.tobytes())
        return ParquetDataset(path, filesystem=home)
