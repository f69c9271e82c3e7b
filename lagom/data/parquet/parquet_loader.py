"""``ParquetLoader``: torch's loader over a Parquet table, shuffled at the speed of the disk, which can be resumed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lagom.data.parquet.dataset import ParquetDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.data.parquet.batches import TableBatchSampler

_TAKEN = ("batch_sampler", "sampler")


class ParquetLoader(DataLoader[Any]):
    """Batches of a ``ParquetDataset``: dicts of tensors by column.

    Shuffled, an epoch is drawn from ``streams`` places of the table at the same time, and rows are mixed within
    ``window_bytes``; each row comes once, and each row group is read once. Reading is done ahead in a thread:
    ``num_workers`` is for data sets that transform rows in Python, as every worker reads what the loader reads.

    Args:
        dataset: one, or what one can be made of: a path, a URL, a list.
        batch_size: rows of a batch.
        shuffle: another order each epoch.
        seed: of the order; None: drawn from torch's global generator at the first epoch.
        drop_last: leave out a last batch that is shorter.
        options: the DataLoader's.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        for name in _TAKEN:
            if options.get(name) is not None:
                raise ValueError(f"ParquetLoader has batches of its own; use torch's DataLoader with {name}=")
        if not isinstance(dataset, ParquetDataset):
            dataset = ParquetDataset(dataset)
        self._batches: TableBatchSampler = dataset.batches(batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._state: tuple[int, int] = (0, 0)
        self._ends: deque[tuple[int, int]] = deque()
        super().__init__(dataset, batch_sampler=self._batches, **options)

    @property
    def _index_sampler(self) -> Any:
        # Through torch's property, for which lagom puts one that deals batches out.
        source = DataLoader._index_sampler.fget(self)  # type: ignore[attr-defined]
        return _Noting(self, source)

    def __iter__(self) -> Any:
        self._ends = deque()
        return _Counted(self, super().__iter__(), self._ends)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass that goes on is, or the next one begins: behind the last batch that the program has seen.

        Equal on all ranks. Batches that workers have fetched ahead do not count.
        """
        return self._batches.state(*self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass go on where ``state`` was made, in the same order, on any number of ranks and workers.

        Raises:
            ValueError: when it is the state of other data.
        """
        self._batches.load(state)
        self._state = (state["epoch"], state["rows"])


class _Noting:
    """A loader's sampler; notes how many rows of the epoch are used when a batch is."""

    def __init__(self, loader: ParquetLoader, source: Any) -> None:
        self._loader = loader
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        # Now: when the first batch is drawn, another pass may have begun.
        return self._noted(iter(self._source), self._loader._ends)

    def _noted(self, source: Iterator[Any], ends: deque[tuple[int, int]]) -> Iterator[Any]:
        for positions in source:
            ends.append((positions.epoch.index, positions.end))
            yield positions


class _Counted:
    """A loader's iterator that keeps its loader's state."""

    def __init__(self, loader: ParquetLoader, iterator: Any, ends: deque[tuple[int, int]]) -> None:
        self._loader = loader
        self._iterator = iterator
        self._ends = ends

    def __iter__(self) -> _Counted:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __next__(self) -> Any:
        try:
            data = next(self._iterator)
        except StopIteration:
            self._loader._state = (self._loader._batches.epoch, 0)
            raise
        self._loader._state = self._ends.popleft()
        return data
