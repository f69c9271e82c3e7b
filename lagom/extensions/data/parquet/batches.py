"""``TableBatchSampler``: a batch sampler for torch's loader, which decides which rows make a batch in each epoch."""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

from lagom.extensions.data.parquet.shard import Epoch, EpochOrder, Positions
from lagom.extensions.data.parquet.streams import AHEAD, MOST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.extensions.data.parquet.table import Table

_UNSHUFFLED_BYTES = 8 << 20
"""Most bytes of rows that are decoded at a time in an epoch that is not shuffled."""
_UNSHUFFLED_BLOCKS = 3 + AHEAD
"""Blocks of unshuffled rows in memory: one in use, ``AHEAD`` that wait, and two that are being decoded."""
_ROUNDS = 4
"""Rounds (one window of each stream) in memory: in use, read ahead, being shuffled, and being decoded."""
_TOLD_BYTES = 64 << 20
"""A warning is shown if decoding takes more than these bytes and leaves less than a quarter of ``window_bytes``."""
_numbers = itertools.count()


class TableBatchSampler(Sampler[Any]):
    """Batches of a table's rows; each pass is an epoch, in a new order if ``shuffle`` is true.

    The order depends only on the seed, the number of the epoch, the row counts of the table's row groups, ``streams``
    and the window. So it is the same for any number of ranks and workers.
    """

    lagom_common = True
    """Tells lagom's loaders that batches are equal on all ranks, so that rank 0 need not send them."""

    def __init__(
        self,
        table: Table,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int | None,
        drop_last: bool,
        window_bytes: int,
        streams: int,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}; it is the rows of a batch, at least 1")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._fingerprint = table.fingerprint
        self._counts = table.counts
        self._num_rows = sum(self._counts)
        self._streams = streams if shuffle else 1
        if shuffle:
            window = _left_of(window_bytes, table, streams) // _ROUNDS
        else:
            window = min(window_bytes // _UNSHUFFLED_BLOCKS, _UNSHUFFLED_BYTES)
        self._window = max(1, window // (table.row_bytes * self._streams))
        self._seed = seed
        self.epoch = 0
        """Number of the next epoch."""
        self._start = 0
        self._source = next(_numbers)

    def __len__(self) -> int:
        left = self._num_rows - self._start
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def __iter__(self) -> EpochPass:
        """Return an iterator over the next epoch, or over the rest of the epoch that ``load`` has set.

        The epoch begins when its first batch is drawn, not here: torch's loader with workers makes an iterator from
        which it never draws.
        """
        return EpochPass(self)

    def begin(self, passing: EpochPass) -> tuple[Iterator[Positions], str]:
        """Begin the next epoch for the iterator ``passing``; return its batches and a fingerprint of its order."""
        if self.shuffle and self._seed is None:
            # The seed is drawn once, not in each epoch, so that epochs after a resumed one do not change.
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        index, start = self.epoch, self._start
        self.epoch, self._start = index + 1, 0
        made = Epoch(
            self._source,
            next(_numbers),
            index,
            self._epoch_seed(index),
            self._streams,
            self._window,
            weakref.ref(passing),
        )
        told = f"{self._fingerprint} {made.seed} {made.streams} {made.window} {start} {self.batch_size}"
        return self._batches(made, start), told

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of the rows in epoch number ``epoch``; the seed must be known."""
        assert self._seed is not None or not self.shuffle
        return EpochOrder(self._counts, self._epoch_seed(epoch), self._streams, self._window)

    def state(self, epoch: int, num_used: int) -> dict[str, Any]:
        """Return the state from which ``load`` continues after the first ``num_used`` rows of epoch ``epoch``."""
        return {
            "version": 1,
            "table": self._fingerprint,
            "shuffle": self.shuffle,
            "seed": self._seed,
            "streams": self._streams,
            "window": self._window,
            "epoch": epoch,
            "rows": num_used,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Let the next pass continue from ``state``; batch size and number of ranks may differ.

        Raises:
            ValueError: if the state belongs to other data, another version or another ``shuffle``, or is not a state.
        """
        if not isinstance(state, dict) or "version" not in state:
            raise ValueError(f"the state is {state!r:.80}; it is what state_dict() of such a loader gave")
        if state["version"] != 1:
            raise ValueError(f"the state has version {state['version']}, and this lagom knows version 1")
        for name, here in (("table", self._fingerprint), ("shuffle", self.shuffle)):
            if state[name] != here:
                raise ValueError(
                    f"the state is of another data set or loader: {name} is {state[name]!r} there and {here!r} here "
                    "(files, their sizes, columns, filters and shuffle must be the same)"
                )
        self._seed, self._streams, self._window = state["seed"], state["streams"], state["window"]
        self.epoch, self._start = state["epoch"], state["rows"]

    def _epoch_seed(self, number: int) -> int | None:
        if not self.shuffle:
            return None
        assert self._seed is not None
        return int(np.random.SeedSequence([self._seed, number]).generate_state(1, np.uint64)[0])

    def _batches(self, epoch: Epoch, start: int) -> Iterator[Positions]:
        for first in range(start, self._num_rows, self.batch_size):
            stop = min(first + self.batch_size, self._num_rows)
            if stop - first == self.batch_size or not self.drop_last:
                yield Positions(epoch, range(first, stop))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # An unpickled copy is another sampler: its passes have another ``Epoch.source``.
        self.__dict__.update(state, _source=next(_numbers))


def _left_of(window_bytes: int, table: Table, streams: int) -> int:
    """Return the bytes of ``window_bytes`` that are left for rows while ``streams`` row groups are decoded.

    The result is at least a quarter of ``window_bytes``. Warn if less than that is left, and decoding takes more than
    ``_TOLD_BYTES``.
    """
    decoded = min(MOST, max(table.counts, default=0)) * table.row_bytes
    decoding = streams * (table.page_bytes + decoded)
    least = window_bytes // 4
    if decoding > window_bytes - least and decoding > _TOLD_BYTES:
        warnings.warn(
            f"window_bytes is {window_bytes >> 20} MB, and to decode {streams} row groups of this table at a time "
            f"takes {decoding >> 20} MB: a process that reads all of them needs {(decoding + least) >> 20} MB. Use "
            "fewer streams=, smaller row groups or fewer columns, or raise window_bytes",
            stacklevel=4,
        )
    return max(window_bytes - decoding, least)


class EpochPass:
    """An iterator over the batches of one epoch, or of the rest of one."""

    def __init__(self, source: TableBatchSampler) -> None:
        self._source = source
        self._begun: tuple[Iterator[Positions], str] | None = None

    @property
    def fingerprint(self) -> str:
        """Text that is equal on ranks that see the same rows in the same order."""
        return self._begin()[1]

    def __iter__(self) -> EpochPass:
        return self

    def __next__(self) -> Positions:
        return next(self._begin()[0])

    def _begin(self) -> tuple[Iterator[Positions], str]:
        if self._begun is None:
            self._begun = self._source.begin(self)
        return self._begun
