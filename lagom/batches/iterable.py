"""Iterable data sets: in a split pass, every rank reads all samples, and keeps its share of each batch.

See Note [Iterable data sets].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info
from torch.utils.data.dataloader import _DatasetKind, default_collate

from lagom.batches.batch_shares import split_batch, split_batch_group
from lagom.batches.sample_digest import digest
from lagom.run_state.loader_pass import BatchShare
from lagom.run_state.random_streams import OwnStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

_WHOLE, _SPLIT, _PER_RANK = range(3)


class ShardedBatch(NamedTuple):
    """Result of ``ShardedCollate``: this rank's share of a batch of an iterable data set."""

    data: Any
    """The collated share; None for an empty share in an evaluation."""
    share: BatchShare
    digest: bytes
    """Digest of the whole batch's size and of three of its samples."""


class ShardedCollate:
    """Replaces a loader's ``collate_fn``, in this process and in workers: collates this rank's share of the samples."""

    def __init__(self, session: Session, loader: DataLoader[Any], streams: OwnStreams) -> None:
        assert loader.batch_size is not None
        self._collate: Callable[[list[Any]], Any] = loader.collate_fn
        self._batch_size = loader.batch_size
        self._rank = session.rank
        self._world_size = session.world_size
        self._streams: OwnStreams | None = streams
        self._is_in_worker = False
        # Kind of sharding, and whether the pass is training. Persistent workers outlive the pass that started them, so
        # they read both from shared memory.
        self._how = torch.zeros(2, dtype=torch.int64, device="cpu")
        if loader.persistent_workers:
            self._how.share_memory_()

    def begin(self, current: LoaderPass, batches: str) -> None:
        """Collate for the pass ``current`` from now on; ``batches`` is the setting of the config."""
        how = _PER_RANK if current.training and batches == "per_rank" else _SPLIT
        self._how[0] = how if current.is_split else _WHOLE
        self._how[1] = int(current.training)

    def __call__(self, samples: list[Any]) -> Any:
        """Return ``samples`` collated, or this rank's share of them as a ``ShardedBatch``."""
        how, training = self._how.tolist()
        if how == _WHOLE:
            return self._collate(samples)
        if how == _PER_RANK:
            step = self._batch_size
            groups = [samples[start : start + step] for start in range(0, len(samples), step)]
            own_part = split_batch_group(groups, self._rank, self._world_size, drop_last=False)
            assert own_part is not None
            mine, share = own_part
        else:
            mine, share = split_batch(samples, self._rank, self._world_size)
        data = self._collate_share(mine) if training or share.num_mine else None
        # Digest three samples: one alone may match by chance if samples are few or simple, such as labels.
        some = samples[0], samples[len(samples) // 2], samples[-1]
        return ShardedBatch(data, share, digest((len(samples), *some)))

    def _collate_share(self, samples: list[Any]) -> Any:
        if self._collate is default_collate:
            return self._collate(samples)
        # The samples differ between ranks: draws of collate_fn must not move the stream that orders samples.
        with self._own_streams().in_fetch():
            return self._collate(samples)

    def _own_streams(self) -> OwnStreams:
        worker = get_worker_info()
        if self._streams is None or (worker is not None and not self._is_in_worker):
            assert worker is not None
            self._is_in_worker = True
            self._streams = OwnStreams(worker.seed, self._rank, torch.device("cpu"))
        return self._streams

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": None}


class GroupedBatchSampler:
    """Replaces the batch sampler of an iterable data set's loader, to set how many samples make a batch."""

    def __init__(self, source: Any, group_size: Callable[[], int]) -> None:
        """Take ``group_size``, which returns how many of the loader's own batches make one batch."""
        self._source = source
        self._group_size = group_size

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        source, group_size = self._source, self._group_size()
        if group_size == 1:
            return iter(source)
        return iter(BatchSampler(source.sampler, source.batch_size * group_size, source.drop_last))


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's data set is iterable."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


# Note [Iterable data sets]
#
# The samples of an iterable data set have no indices, so in a pass that is split every rank draws all of them, in its
# own process or in its own workers. Ranks split only the collating, moving and computing: rank r keeps positions r,
# r + world_size, ... of each batch. So batches, their order and their number are as in one process, whatever a data set
# does with get_worker_info(). The loader's collate function takes the share: only collate_fn sees all samples of a
# batch, in this process and in forked or spawned workers. It returns the share with the batch, since the size of the
# next batch is not known beforehand: the stream of a worker may end.
#
# With per_rank, ranks draw world_size batches at once, as one process does with a batch_size world_size times as large.
# Rank r keeps the r-th of these batches, or positions r, r + world_size, ... if there are fewer batches.
#
# The choice of samples may depend on random numbers. So the data set draws from the common streams, or in workers from
# streams with equal seeds; its augmentations then also equal those of one process. A data set that gives different
# samples on every rank (it shards itself, or has a generator without a seed) would silently break "each sample once".
# So ranks compare digests of three samples of each batch after 1, 2, 4, ... batches (see sample_digest.py), in an
# evaluation after the first batch only. A data set that shards itself on purpose must have the attribute lagom_sharded:
# see self_sharded.py.
