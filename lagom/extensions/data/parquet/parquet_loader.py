"""``ParquetLoader``: torch's loader over a Parquet table, which shuffles at the disk's speed and can be resumed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lagom.extensions.data.parquet.dataset import ParquetDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.extensions.data.parquet.batches import TableBatchSampler

_TAKEN = ("batch_sampler", "sampler")


class ParquetLoader(DataLoader[Any]):
    """Loads batches of a ``ParquetDataset``: dicts of tensors by column.

    With ``shuffle``, an epoch takes rows from several places of the table (streams) at the same time, and shuffles them
    within a window. ``streams`` and ``window_bytes`` of the ``ParquetDataset`` set the number of places and the size of
    the window. No row comes twice in an epoch. A process reads each row group once, except a row group in which one
    stream ends and the next begins. A thread reads ahead. Use ``num_workers`` only if rows are transformed in Python,
    since every worker reads all rows of its rank.

    Args:
        dataset: a ``ParquetDataset``, or a path, a URL or a list of these.
        batch_size: rows of a batch.
        shuffle: whether each epoch has another order.
        seed: seed of the orders; None: drawn from torch's global generator at the first epoch.
        drop_last: whether to leave out a last batch that is shorter.
        options: further options of torch's ``DataLoader``.

    Raises:
        ValueError: if a sampler is passed, or ``batch_size`` is no number of rows.
        Exception: as ``ParquetDataset``, if ``dataset`` is not one.
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
        # Uses torch's property, which lagom replaces in a run by one that gives each rank its share.
        source = DataLoader._index_sampler.fget(self)  # type: ignore[attr-defined]
        return _Noting(self, source)

    def __iter__(self) -> Any:
        self._ends = deque()
        return _Counted(self, super().__iter__(), self._ends)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the program has got, to resume the pass there.

        The state is equal on all ranks. Batches that workers have loaded ahead do not count.
        """
        return self._batches.state(*self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue from ``state`` in the same order, on any number of ranks and workers.

        Raises:
            ValueError: if the state belongs to other data or another ``shuffle``, or is not a state.
        """
        self._batches.load(state)
        self._state = (state["epoch"], state["rows"])


class _Noting:
    """Wraps a loader's sampler, and records for each batch the number of rows of the epoch up to its end."""

    def __init__(self, loader: ParquetLoader, source: Any) -> None:
        self._loader = loader
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        # Take this pass's list now: when the first batch is drawn, another pass may have replaced it.
        return self._noted(iter(self._source), self._loader._ends)

    def _noted(self, source: Iterator[Any], ends: deque[tuple[int, int]]) -> Iterator[Any]:
        for positions in source:
            ends.append((positions.epoch.index, positions.end))
            yield positions


class _Counted:
    """Wraps a loader's iterator, and updates the loader's state with each batch."""

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
