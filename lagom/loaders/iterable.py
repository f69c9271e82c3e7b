"""Iterable data sets: every rank goes through all of one, and keeps its share of each batch.

See Note [Iterable data sets].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info
from torch.utils.data.dataloader import _DatasetKind, default_collate

from lagom.loaders.index_sampler import per_rank, split_batch
from lagom.loaders.sample_digest import digest
from lagom.run_state.loader_pass import BatchShare
from lagom.run_state.random_streams import OwnStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

_WHOLE, _SPLIT, _PER_RANK = range(3)


class ShardedBatch(NamedTuple):
    """What a loader's iterator gives in place of a batch of an iterable data set."""

    data: Any
    """The share, collated; None for one that would count nowhere, in an evaluation."""
    share: BatchShare
    digest: bytes
    """Of the whole batch."""


class ShardedCollate:
    """Stands for a loader's ``collate_fn``, here or in its workers: collates this rank's share of the samples."""

    def __init__(self, session: Session, loader: DataLoader[Any], streams: OwnStreams) -> None:
        assert loader.batch_size is not None
        self._collate: Callable[[list[Any]], Any] = loader.collate_fn
        self._batch_size = loader.batch_size
        self._rank = session.rank
        self._world_size = session.world_size
        self._streams: OwnStreams | None = streams
        self._is_in_worker = False
        # How, and whether for training. Shared, as persistent workers outlive the pass that they were started for.
        self._how = torch.zeros(2, dtype=torch.int64)
        if loader.persistent_workers:
            self._how.share_memory_()

    def begin(self, current: LoaderPass, batches: str) -> None:
        """What is collated from now on belongs to the pass ``current``."""
        how = _PER_RANK if current.training and batches == "per_rank" else _SPLIT
        self._how[0] = how if current.sharded else _WHOLE
        self._how[1] = int(current.training)

    def __call__(self, samples: list[Any]) -> Any:
        """``samples`` collated, or this rank's share of them as a ``ShardedBatch``."""
        how, training = self._how.tolist()
        if how == _WHOLE:
            return self._collate(samples)
        if how == _PER_RANK:
            step = self._batch_size
            groups = [samples[start : start + step] for start in range(0, len(samples), step)]
            dealt = per_rank(groups, self._rank, self._world_size, drop_last=False)
            assert dealt is not None
            mine, share = dealt
        else:
            mine, share = split_batch(samples, self._rank, self._world_size)
        data = self._collated(mine) if training or share.num_mine else None
        # One sample may be the same by chance where they are few or simple, such as labels.
        some = samples[0], samples[len(samples) // 2], samples[-1]
        return ShardedBatch(data, share, digest((len(samples), *some)))

    def _collated(self, samples: list[Any]) -> Any:
        if self._collate is default_collate:
            return self._collate(samples)
        # It has other samples on every rank: draws of its own must not move the stream that orders them.
        with self._own().in_fetch():
            return self._collate(samples)

    def _own(self) -> OwnStreams:
        worker = get_worker_info()
        if self._streams is None or (worker is not None and not self._is_in_worker):
            assert worker is not None
            self._is_in_worker = True
            self._streams = OwnStreams(worker.seed, self._rank, torch.device("cpu"))
        return self._streams

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": None}


class GroupedBatchSampler:
    """Stands for the batch sampler of such a loader, which tells only how many samples make a batch."""

    def __init__(self, source: Any, wide: Callable[[], int]) -> None:
        """``wide``: into how many batches of the loader's the next one is to be dealt."""
        self._source = source
        self._wide = wide

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        source, wide = self._source, self._wide()
        if wide == 1:
            return iter(source)
        return iter(BatchSampler(source.sampler, source.batch_size * wide, source.drop_last))


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether the loader's data set is one."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


# Note [Iterable data sets]
#
# Nobody can tell where the samples of an iterable data set are, so every rank draws all of them, in its own
# process or in workers of its own; what it need not collate, move and compute is dealt out: rank r keeps positions
# r, r + world_size, ... of each batch. So batches, their order and number are those of one machine, whatever a data
# set does with get_worker_info(). The share is taken in the loader's collate function, the one thing of a loader
# that sees the samples of a batch together, in this process and in workers that were forked or spawned. What it
# returns carries the share along, since workers that run dry make the number of a batch unknown beforehand.
#
# For per_rank one draw is world_size batches long: what one machine does with that batch_size.
#
# Which samples come may hang on random numbers, so these are drawn from the common streams, in workers from
# streams started equal: augmentation in such a data set is one machine's too. A data set that gives other
# samples on every rank (that shards itself, or has a generator without a seed) would make "each sample once"
# untrue silently: digests of three samples of each batch are compared, after 1, 2, 4, ... batches
# (see digest.py). One that shards itself is told apart by its attribute: see sharded.py.
