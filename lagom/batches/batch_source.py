"""``choose_batch_source``: choose how a pass takes its batches and this rank's shares, by the kind of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from lagom.batches.iterable import ShardedBatch, is_iterable
from lagom.batches.sample_digest import SampleComparison, digest
from lagom.batches.self_sharded import SelfShardedSource

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import BatchShare, LoaderPass
    from lagom.session.session import Session


Fetch = Callable[[Any], Any]
"""Returns the next batch of a loader's iterator."""


class BatchSource(Protocol):
    """Takes the batches of one pass."""

    def take(self, fetch: Fetch, source: Any) -> tuple[Any, BatchShare | None]:
        """Return the next batch and this rank's share of it, or None in place of the share.

        The share is None for whole batches, in evaluations over map-style and self-sharded data sets, and for a
        self-sharded data set that is read in a thread, where ranks cannot exchange the sizes of their batches.

        Args:
            source: the loader's iterator; ``fetch(source)`` gives its next batch.

        Raises:
            StopIteration: at the end of the pass.
            DivergenceError: if ranks are at different places of the program, or get different samples of a stream.
        """


def choose_batch_source(session: Session, loader: DataLoader[Any], current: LoaderPass) -> BatchSource:
    """Choose the source for the pass ``current`` over ``loader``."""
    if current.own and current.training:
        return SelfShardedSource(session)
    if is_iterable(loader) and current.is_split:
        return _StreamedBatches(session, current)
    if current.is_split:
        resizes = current.training and getattr(loader.dataset, "lagom_resizes", False)
        return _ResizedBatches(session, current) if resizes else _IndexedBatches(current)
    if is_iterable(loader) and session.distributed and not current.own and _must_be_equal(session, current):
        return _ComparedBatches(session, current)
    return _WholeBatches()


def _must_be_equal(session: Session, current: LoaderPass) -> bool:
    """Return whether batches must be equal on all ranks, because forwards of this pass may be split by rows."""
    return session.config.batches == "whole" if current.training else session.config.evaluation == "gathered"


class _WholeBatches:
    def take(self, fetch: Fetch, source: Any) -> tuple[Any, None]:
        return fetch(source), None


class _IndexedBatches:
    """Batches of a map-style data set; in training the index sampler queues each batch's share before it is loaded."""

    def __init__(self, current: LoaderPass) -> None:
        self._shares = current.shares
        self._training = current.training

    def take(self, fetch: Fetch, source: Any) -> tuple[Any, BatchShare | None]:
        data = fetch(source)
        if not self._training:
            return data, None
        # A loader that resumes may have skipped batches, so the oldest shares are dropped. The last shares in the queue
        # belong to this batch and to the batches that workers are still loading.
        ahead = source._send_idx - source._rcvd_idx if source._num_workers else 0
        while len(self._shares) > ahead + 1:
            self._shares.popleft()
        return data, self._shares.popleft()


class _ResizedBatches:
    """Batches of a data set whose transform may return more or fewer rows than were asked for (``lagom_resizes``).

    One exchange for each batch sums the row counts of all ranks, so that shares have the right weights.
    """

    def __init__(self, session: Session, current: LoaderPass) -> None:
        self._indexed = _IndexedBatches(current)
        self._sharded = SelfShardedSource(session)

    def take(self, fetch: Fetch, source: Any) -> tuple[Any, BatchShare | None]:
        data, share = self._indexed.take(fetch, source)
        return data, share and self._sharded.recount(data, share)


class _StreamedBatches:
    """Batches of an iterable data set; ``ShardedCollate`` returns the share together with the batch.

    In an evaluation, batches without a sample for this rank are left out.
    """

    def __init__(self, session: Session, current: LoaderPass) -> None:
        self._comparison = SampleComparison(session, current)
        self._training = current.training
        self._compares = True

    def take(self, fetch: Fetch, source: Any) -> tuple[Any, BatchShare]:
        while True:
            try:
                dealt: ShardedBatch = fetch(source)
            except StopIteration:
                if self._compares:
                    self._comparison.finish()
                raise
            if self._compares:
                self._comparison.add_batch(dealt.digest)
                # An evaluation may end sooner on some ranks than on others, so only its start is compared.
                self._compares = self._training
            if self._training or dealt.share.num_mine:
                return dealt.data, dealt.share


class _ComparedBatches:
    """Whole batches of an iterable data set, which must be the same on all ranks."""

    def __init__(self, session: Session, current: LoaderPass) -> None:
        self._comparison = SampleComparison(session, current)
        self.last_digest = b""
        """Digest of the batch that was taken last."""

    def take(self, fetch: Fetch, source: Any) -> tuple[Any, None]:
        try:
            data = fetch(source)
        except StopIteration:
            self._comparison.finish()
            raise
        self.last_digest = digest(data)
        self._comparison.add_batch(self.last_digest)
        return data, None
