"""A rank's share of a batch's indices, and the index sampler that replaces a loader's own on every rank.

Batches are split only with batches="split" or "per_rank", and in sharded evaluations. Otherwise a rank gets whole
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from lagom.batches.sampler_sync import iterate_in_common_order, keep_state
from lagom.run_state.loader_pass import BatchShare, LoaderPass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session


def split_batch(batch: Any, rank: int, world_size: int) -> tuple[Any, BatchShare]:
    """Return the items (indices or samples) of ``rank`` in a batch, and its share; each item goes to one rank.

    If the batch has fewer items than there are ranks, a rank without an item gets the first one, with weight 0, so that
    all ranks take the same number of steps; evaluations leave such a batch out. ``BatchIndices`` are split by their
    own method ``deal``.
    """
    if not hasattr(batch, "__getitem__") or not hasattr(batch, "__len__"):
        batch = list(batch)
    mine = batch.deal(rank, world_size) if isinstance(batch, BatchIndices) else batch[rank::world_size]
    even = len(batch) % world_size == 0
    return (mine if len(mine) else batch[:1]), BatchShare(len(mine), len(batch), even)


def split_batch_group(
    batches: list[Any], rank: int, world_size: int, *, drop_last: bool
) -> tuple[Any, BatchShare] | None:
    """Return the items of ``rank`` in ``world_size`` batches that make one global batch, and its share.

    The items are those of ``batches[rank]``; ``BatchIndices`` are joined and split instead. If there are fewer than
    ``world_size`` batches, their items are split, or, with ``drop_last``, dropped. Return None if they are dropped, or
    if there is no batch.
    """
    if batches and isinstance(batches[0], BatchIndices):
        full = len(batches) == world_size or not drop_last
        return split_batch(batches[0].together(batches), rank, world_size) if full else None
    if len(batches) == world_size:
        sizes = [len(batch) for batch in batches]
        return batches[rank], BatchShare(sizes[rank], sum(sizes), len(set(sizes)) == 1)
    if not batches or drop_last:
        return None
    return split_batch(list(chain.from_iterable(batches)), rank, world_size)


class RankIndexSampler:
    """Takes the place of a loader's batch sampler, or of its sampler if the loader makes no batches.

    All ranks follow rank 0's order, except in evaluations that are neither gathered nor split: there every rank follows
    its own sampler. With "split" and "per_rank", and in sharded evaluations, the rank takes its share of each global
    batch, unless the loader makes no batches.

    Args:
        source: the loader's own batch sampler or sampler.
        start: begins a pass, for a program that iterates over the sampler itself and not over the loader.
        group_size: returns how many of the loader's own batches make one batch of the next pass; ``__len__`` uses it.
    """

    def __init__(
        self,
        session: Session,
        source: Any,
        start: Callable[[], LoaderPass],
        group_size: Callable[[], int],
        *,
        drop_last: bool,
    ) -> None:
        self._session = session
        self._source = source
        self._start = start
        self._group_size = group_size
        self._drop_last = drop_last
        self._current: LoaderPass | None = None

    def __len__(self) -> int:
        length, group_size = len(self._source), self._group_size()
        return length // group_size if self._drop_last else -(-length // group_size)

    def __iter__(self) -> Iterator[Any]:
        # A loader that resumes iterates over its sampler again within the same pass, which is kept.
        current = self._current = self._session.starting_pass or self._current or self._start()
        if not (current.training or current.is_split or self._session.plan.config.evaluation == "gathered"):
            return iter(self._source)
        # As in torch, iter() of a source that is not torch's own is called now: it may draw random numbers.
        batches = iterate_in_common_order(self._session, self._source, current)
        if not current.is_split:
            return batches
        current.shares.clear()
        if not current.training:
            return keep_state(self._split_for_evaluation(batches), batches)
        if self._session.plan.config.batches == "per_rank":
            return keep_state(self._split_batch_groups(batches, current), batches)
        return keep_state(self._split_batches(batches, current), batches)

    def _split_batches(self, batches: Iterator[Any], current: LoaderPass) -> Iterator[Any]:
        for batch in batches:
            mine, share = split_batch(batch, self._session.rank, self._session.world_size)
            current.shares.append(share)
            yield mine

    def _split_batch_groups(self, batches: Iterator[Any], current: LoaderPass) -> Iterator[Any]:
        rank, world_size = self._session.rank, self._session.world_size
        while group := list(islice(batches, world_size)):
            found = split_batch_group(group, rank, world_size, drop_last=self._drop_last)
            if found is None:
                return
            current.shares.append(found[1])
            yield found[0]

    def _split_for_evaluation(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            mine, share = split_batch(batch, self._session.rank, self._session.world_size)
            if share.num_mine:
                yield mine


class ResumableIndexSampler(RankIndexSampler):
    """A ``RankIndexSampler`` for a source with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """Return the state of the source."""
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load ``state`` into the source, which continues from there."""
        self._source.load_state_dict(state)


class BatchIndices:
    """Indices of a batch that are split over ranks by methods of their own, not by their order in the batch.

    A sampler that yields them has a data set that reads them, in ``__getitems__``.
    """

    __slots__ = ()

    def deal(self, rank: int, world_size: int) -> Any:
        """Return the indices of ``rank``."""
        raise NotImplementedError

    @staticmethod
    def together(batches: Sequence[Any]) -> Any:
        """Join batches that follow each other into one."""
        raise NotImplementedError
