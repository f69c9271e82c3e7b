"""``WrittenFrame`` and ``CollectedFrame``: travel to ranks in place of a Spark DataFrame, then become data sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WrittenFrame:
    """A DataFrame that Spark has written to ``url`` as Parquet."""

    url: str

    def __call__(self) -> Any:
        """Return a ``ParquetDataset`` of the files."""
        from lagom.extensions.data.parquet.dataset import ParquetDataset

        return ParquetDataset(self.url)


@dataclass(frozen=True, eq=False)
class CollectedFrame:
    """A small DataFrame that was collected on the driver."""

    content: Any
    """The bytes of a Parquet file, as an array, since arrays travel outside of the pickle."""
    digest: str
    """Hash of the bytes, which names their file in the in-memory file system."""

    def __call__(self) -> Any:
        """Return a ``ParquetDataset`` of the bytes, which are kept in an in-memory file system."""
        from fsspec.implementations.memory import MemoryFileSystem

        from lagom.extensions.data.parquet.dataset import ParquetDataset

        path = f"/lagom/{self.digest}/part-0.parquet"
        home = MemoryFileSystem()
        if not home.exists(path):
            home.pipe(path, self.content.tobytes())
        return ParquetDataset(path, filesystem=home)
