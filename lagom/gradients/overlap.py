"""``OverlappedBackward``: the large gradients of a backward travel while it still runs."""

from __future__ import annotations

from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from lagom.collectives.agreement_exchange import signature
from lagom.errors import CollectiveError
from lagom.gradients.bucket_pipeline import BucketPipeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lagom.collectives.agreement_exchange import AgreedExchange
    from lagom.collectives.group import Group
    from lagom.gradients.bucket_pipeline import ScatterParts
    from lagom.gradients.divergence import DivergenceMonitor
    from lagom.gradients.reduction.buckets import AllReduceBucket, ReduceScatterBucket, ShardMap
    from lagom.gradients.reduction.layout import Layout
    from lagom.run_state.leaves import Leaves

WORTH = 4 << 20
"""Bytes of large gradients from which an exchange at the start of a backward pays, by measurement."""
_PLACE = "the start of a backward"
_MAX_KNOWN = 64
_MAX_PATIENCE = 64
"""Backwards to wait, at most, where ranks reach different leaves."""
Key = tuple[tuple[int, torch.dtype, torch.Size], ...]


class OverlappedBackward:
    """Sums buckets of gradients as soon as a backward has them. See Note [Overlap].

    All methods are called on all ranks in the same order.
    """

    def __init__(
        self, group: Group, leaves: Leaves, watch: DivergenceMonitor, frame: AgreedExchange, *, allowed: bool = True
    ) -> None:
        self._group = group
        self._allowed = allowed
        self._leaves = leaves
        self._watch = watch
        self._frame = frame
        self._known: dict[Key, tuple[bytes, list[list[int]]]] = {}
        """Of what all ranks have had: signature and buckets."""
        self._pause = 0
        self._patience = 1
        self._running: BucketPipeline | None = None
        self._abandoned: list[AllReduceBucket | ReduceScatterBucket | None] = []
        self.parts: ScatterParts | None = None

    @property
    def is_launching(self) -> bool:
        """Whether a bucket is being filled, which reads gradients."""
        return self._running is not None and self._running.is_launching

    @property
    def may_start(self) -> bool:
        """Whether a backward may begin with an exchange."""
        return bool(self._known)

    def agreed(self, layout: Layout) -> None:
        """A backward had ``layout`` on all ranks, and did not overlap."""
        if layout.on_cpu < WORTH or not self._allowed:
            return
        leaves = [self._leaves.tensor(number) for number in layout.numbers]
        key = _key(layout.numbers, [leaf for leaf in leaves if leaf is not None])
        if len(self._known) == _MAX_KNOWN:
            self._known.clear()
        buckets = [[layout.numbers[i] for i in bucket.indices] for bucket in layout.buckets]
        self._known[key] = _signed(key), buckets

    def start(self, numbers: Sequence[int], leaves: Sequence[torch.Tensor], plain: Iterable[torch.Tensor] = ()) -> None:
        """A backward is about to run that will reach ``leaves``; a collective if one is expected.

        Args:
            plain: those of which nobody waits for the gradient of this backward alone.

        Raises:
            DivergenceError: on all ranks, when others are elsewhere.
        """
        if not self._known:
            return
        if self._pause:
            self._pause -= 1
            return
        key = _key(numbers, leaves)
        mine, buckets = self._known.get(key) or (_signed(key), [])
        early = set(map(id, plain))
        deals = self._deals(buckets, early)
        if deals:  # which rank keeps what is to be the same on all
            mine = signature(mine + repr([(i, deal.counts, deal.pieces) for i, deal in deals.items()]).encode())
        if not self._frame.exchange(mine):
            self._watch.meet(_PLACE)
            self._pause, self._patience = self._patience, min(2 * self._patience, _MAX_PATIENCE)
        elif buckets:
            self._group.open_aside()
            self._running = BucketPipeline(self._group, self._leaves, buckets)
            if self.parts is not None:
                self._running.part_early(early, self.parts, deals)

    def _deals(self, buckets: Sequence[Sequence[int]], early: set[int]) -> dict[int, ShardMap]:
        """Of buckets from which each rank needs its part only."""
        found: dict[int, ShardMap] = {}
        if self.parts is None or not self._group.reduces_parts:
            return found
        for i, bucket in enumerate(buckets):
            leaves = [leaf for number in bucket if (leaf := self._leaves.tensor(number)) is not None]
            if all(id(leaf) in early for leaf in leaves) and (deal := self.parts.dealt(leaves)) is not None:
                found[i] = deal
        return found

    def accumulates_inside(self, leaves: Sequence[torch.Tensor]) -> None:
        """A backward inside the one under way will accumulate into ``leaves``."""
        if self._running is not None:
            self._running.hold_back(leaves)

    def end(self) -> BucketPipeline | None:
        """The backward ran; what it had of overlap, all of which is under way now."""
        running, self._running = self._running, None
        if running is not None:
            running.finish()
        return running

    def abandon(self) -> None:
        """The backward failed. Other ranks, where it did not, must not wait for more than they have to."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(CollectiveError):  # the error that is under way tells more
                running.finish()
            self._abandoned = running.moving  # the memory must live until it is overwritten


def _key(numbers: Sequence[int], leaves: Sequence[torch.Tensor]) -> Key:
    """Equal for backwards that reach the same."""
    entries = [(n, leaf.dtype, leaf.shape) for n, leaf in zip(numbers, leaves, strict=True)]
    return tuple(sorted(entries, key=itemgetter(0)))


def _signed(key: Key) -> bytes:
    return signature(_PLACE.encode() + repr(key).encode())


# Note [Overlap]
#
# A bucket may leave during a backward only if all ranks will send it. Which leaves a backward reaches is known before
# it runs, from its graph. So once a backward has had large gradients, and was the same on all ranks, those after it
# begin with an exchange of signatures of what they will reach. All ranks make that exchange, since all know what there
# has been. Where all signatures are that of such a backward, the buckets of its layout are summed in their order, each
# as soon as its gradients are complete, on connections of their own: what else the backward exchanges (statistics of
# BatchNorm) may come before or after on another rank. When the backward has ended the rest is launched, zeros for what
# got no gradient after all, also when it failed: so whatever happens, all ranks send the same buckets. The small
# gradients follow as in any other backward, with its signature.
#
# With ``zero_lvl=2`` a rank keeps only its part of an average. Where ranks share memory it gets no more than that; that
# all do is a part of what they agree on at the start. Elsewhere buckets that have been summed are cut. Both while the
# backward runs, and where more than two are under way it waits for the first: not longer than a moment, since what that
# needs of another rank may come after an exchange in which that rank waits for this one. Sums do not depend on it.
#
# Where the signatures differ nothing has been sent. The ranks go on as ever, and leave that exchange out of more and
# more backwards.
#
# A backward inside the backward (a re-entrant checkpoint) accumulates into leaves a second time. A program that has
# them from the start reaches their leaves in none of the graphs that are looked at, and never overlaps.
