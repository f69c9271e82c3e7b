"""``BucketPipeline``: sends buckets of gradients while the backward still runs. See Note [Overlap] in overlap.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lagom.errors import LagomError
from lagom.gradients.reduction.buckets import (
    AllReduceBucket,
    ReduceScatterBucket,
    finish_all_reduce,
    finish_reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from lagom.gradients.tensor_averager import real_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lagom.exchange.group import Group
    from lagom.gradients.reduction.buckets import ShardMap
    from lagom.run_state.leaves import Leaves

_MAX_MOVING = 2
"""Buckets that may travel at once if ranks keep only parts; with more, the backward waits for the first bucket."""
_PATIENCE_S = 0.2
"""Most seconds to wait for a bucket. After one wait without success, the backward does not wait again."""
_NAP_S = 2e-4


class ShardStore(Protocol):
    """Stores this rank's shards of averages, and removes the leaves' gradients; for ``zero_lvl`` 2 and 3."""

    def bucket_shard_map(self, leaves: Sequence[torch.Tensor]) -> ShardMap | None:
        """Return which rank gets which part of a bucket of averages; None if every rank must get them whole."""

    def cut_gradient_early(self, leaf: torch.Tensor) -> None:
        """Replace the whole average in ``leaf.grad`` by this rank's shard, while the backward may still fail."""

    def store_part_early(self, leaf: torch.Tensor, part: torch.Tensor | None) -> None:
        """Store ``part``, this rank's shard of the average; None if this rank needs nothing of the leaf."""


class BucketPipeline:
    """Sends the buckets of one backward in order, each as soon as its gradients are complete, and stores the averages.

    Args:
        buckets: the leaves' numbers, by bucket, in the order in which buckets travel.
    """

    def __init__(self, group: Group, leaves: Leaves, buckets: Sequence[Sequence[int]]) -> None:
        self.missing: list[torch.Tensor] = []
        """Leaves for which zeros were sent, since the backward gave them no gradient."""
        self.moving: list[AllReduceBucket | ReduceScatterBucket | None] = []
        """The buckets that have been sent; None for a bucket whose averages are stored already."""
        self.is_launching = False
        self._early: set[int] = set()
        self._shard_store: ShardStore | None = None
        self._shard_maps: Mapping[int, ShardMap] = {}
        self._num_landed = 0
        self._patience_s = _PATIENCE_S
        self._group = group
        found = [[leaves.tensor(number) for number in bucket] for bucket in buckets]
        self._buckets = [[leaf for leaf in bucket if leaf is not None] for bucket in found]
        self._place = {id(leaf): i for i, bucket in enumerate(self._buckets) for leaf in bucket}
        self._num_left = [len(bucket) for bucket in self._buckets]
        self._handles: list[Any] = [
            leaf.register_post_accumulate_grad_hook(self._count_gradient) for bucket in self._buckets for leaf in bucket
        ]

    def contains(self, leaf: torch.Tensor) -> bool:
        """Return whether ``leaf``'s gradient travels in a bucket."""
        return id(leaf) in self._place

    def delay_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Send the buckets of ``leaves``, to which an inner backward adds, and all later buckets only at the end.

        Raises:
            LagomError: if one of these buckets has been sent already.
        """
        for leaf in leaves:
            place = self._place.get(id(leaf))
            if place is not None:
                if place < len(self.moving):
                    raise LagomError(
                        "a checkpoint with use_reentrant=True adds to a gradient that is being averaged already; "
                        "use use_reentrant=False, for the forwards of this program from the first one on"
                    )
                self._num_left[place] = len(self._place) + 1

    def scatter_early(self, plain: set[int], shard_store: ShardStore, shard_maps: Mapping[int, ShardMap]) -> None:
        """Have ``shard_store`` store averages while the backward still runs.

        Args:
            plain: ids of leaves for which this is allowed.
            shard_maps: for each bucket of which ranks get parts only, which rank gets which part.
        """
        self._early, self._shard_store, self._shard_maps = plain, shard_store, shard_maps

    def launch_rest(self) -> None:
        """Send the remaining buckets, at the end of the backward."""
        for handle in self._handles:
            handle.remove()
        self._launch(len(self._buckets))

    def wait_for_all(self, without: set[int]) -> None:
        """Wait for all buckets, and store the averages.

        Args:
            without: ids of leaves that no rank reached; their gradients become None.
        """
        for moving, bucket in zip(self.moving, self._buckets, strict=True):
            if moving is not None:
                self._wait_for(moving, bucket, without)
        for leaf in self.missing:
            if id(leaf) in without:
                leaf.grad = None

    def _wait_for(
        self, moving: AllReduceBucket | ReduceScatterBucket, bucket: Sequence[torch.Tensor], without: set[int]
    ) -> None:
        if isinstance(moving, AllReduceBucket):
            finish_all_reduce(moving, self._group.wait, self._group.world_size)
            return
        assert self._shard_store is not None
        for leaf, part in zip(bucket, finish_reduce_scatter(moving, self._group.wait, len(bucket)), strict=True):
            if id(leaf) not in without:
                self._shard_store.store_part_early(leaf, part)

    def _count_gradient(self, leaf: torch.Tensor) -> None:
        self._num_left[self._place[id(leaf)]] -= 1
        ready = len(self.moving)
        while ready < len(self._buckets) and self._num_left[ready] <= 0:
            ready += 1
        self._launch(ready)
        self._take_completed()

    @torch.no_grad()
    def _take_completed(self) -> None:
        while self._shard_store is not None and self._num_landed < len(self.moving):
            moving, bucket = self.moving[self._num_landed], self._buckets[self._num_landed]
            if moving is None or not all(id(leaf) in self._early for leaf in bucket):
                return
            if not moving.work.is_completed() and not self._wait_shortly(moving):
                return
            self._wait_for(moving, bucket, set())
            for leaf in bucket if isinstance(moving, AllReduceBucket) else ():
                self._shard_store.cut_gradient_early(leaf)
            self.moving[self._num_landed] = moving = None
            self._num_landed += 1

    def _wait_shortly(self, moving: AllReduceBucket | ReduceScatterBucket) -> bool:
        """Wait a moment for ``moving`` if too many buckets travel; return whether it has arrived."""
        if len(self.moving) - self._num_landed <= _MAX_MOVING:
            return False
        # Waiting must end: another rank may send its part only after an exchange that this rank reaches later.
        deadline = time.monotonic() + self._patience_s
        while not moving.work.is_completed():
            if time.monotonic() > deadline:
                self._patience_s = 0.0
                return False
            time.sleep(_NAP_S)
        return True

    @torch.no_grad()
    def _launch(self, end: int) -> None:
        self.is_launching = True
        for bucket in self._buckets[len(self.moving) : end]:
            for leaf in bucket:
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
                    self.missing.append(leaf)
            gradients = [real_gradient(leaf) for leaf in bucket]
            shard_map = self._shard_maps.get(len(self.moving))
            if shard_map is None:
                self.moving.append(start_all_reduce(gradients, self._group.all_reduce_aside, self._group.world_size))
            else:
                reduce = self._group.reduce_parts_aside
                self.moving.append(start_reduce_scatter(gradients, bucket, shard_map, self._group.rank, reduce))
        self.is_launching = False
