"""``OverlappedBackward``: sends large gradients by a ``BucketPipeline`` while their backward still runs."""

from __future__ import annotations

import time
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lagom.errors import CollectiveError, LagomError
from lagom.exchange.agreement_exchange import signature
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
    from collections.abc import Iterable, Mapping, Sequence

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.gradients.divergence import DivergenceMonitor
    from lagom.gradients.reduction.buckets import Layout, ShardMap
    from lagom.run_state.leaves import Leaves

MIN_BYTES = 4 << 20
"""Bytes of gradients in buckets from which overlap pays for its additional exchange; measured on the CPU."""
_PLACE = "the start of a backward"
_MAX_KNOWN = 64
_MAX_PATIENCE = 64
"""Largest number of backwards without overlap after ranks have reached different leaves."""
Key = tuple[tuple[int, torch.dtype, torch.Size, bool], ...]
"""Number, type and shape of each leaf, and whether it is on an accelerator."""


class OverlappedBackward:
    """Sums buckets of gradients as soon as a backward has them. See Note [Overlap].

    All methods are called on all ranks in the same order.
    """

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        divergence: DivergenceMonitor,
        frame: AgreedExchange,
        *,
        allowed: bool = True,
    ) -> None:
        self._group = group
        self._allowed = allowed
        self._leaves = leaves
        self._divergence = divergence
        self._frame = frame
        self._known: dict[Key, tuple[bytes, list[list[int]]]] = {}
        """Signature and buckets of each set of leaves that a backward with large gradients has reached on all ranks."""
        self._pause = 0
        """Backwards that still run without the exchange at their start."""
        self._patience = 1
        """Length of the next pause."""
        self._running: BucketPipeline | None = None
        self._abandoned: list[AllReduceBucket | ReduceScatterBucket | None] = []
        self.shard_store: ShardStore | None = None

    @property
    def is_launching(self) -> bool:
        """Whether a bucket is being filled now, so that reads of gradients are lagom's own."""
        return self._running is not None and self._running.is_launching

    @property
    def may_start(self) -> bool:
        """Whether the next backward may begin with an exchange."""
        return bool(self._known)

    def record_layout(self, layout: Layout) -> None:
        """Remember ``layout``, on which all ranks have agreed, if it is large enough to overlap next time."""
        # Where ranks share an accelerator, its gradients travel by copies on the CPU when the backward has ended.
        is_served = [self._group.has_gpus or not entry.on_device for entry in layout.entries]
        size = layout.on_cpu + (layout.on_device if self._group.has_gpus else 0)
        if size < MIN_BYTES or not self._allowed:
            return
        leaves = [self._leaves.tensor(number) for number in layout.numbers]
        key = _backward_key(layout.numbers, [leaf for leaf in leaves if leaf is not None])
        if len(self._known) == _MAX_KNOWN:
            self._known.clear()
        served = [bucket.indices for bucket in layout.buckets if is_served[bucket.indices[0]]]
        buckets = [[layout.numbers[i] for i in indices] for indices in served]
        self._known[key] = _sign(key), buckets

    def begin(self, numbers: Sequence[int], leaves: Sequence[torch.Tensor], plain: Iterable[torch.Tensor] = ()) -> None:
        """Agree with the other ranks whether the backward that will reach ``leaves`` overlaps.

        A collective, unless no backward has been large enough, or overlap pauses.

        Args:
            numbers: the leaves' numbers.
            plain: leaves without hooks and earlier gradients, whose averages may be cut during the backward.

        Raises:
            DivergenceError: on all ranks, if they are at different places of the program, or parameters differ.
        """
        if not self._known:
            return
        if self._pause:
            self._pause -= 1
            return
        key = _backward_key(numbers, leaves)
        mine, buckets = self._known.get(key) or (_sign(key), [])
        early = set(map(id, plain))
        shard_maps = self._find_shard_maps(buckets, early)
        if shard_maps:  # all ranks must use the same maps
            entries = [(i, shard_map.counts, shard_map.pieces) for i, shard_map in shard_maps.items()]
            mine = signature(mine + repr(entries).encode())
        if not self._frame.exchange(mine):
            self._divergence.find_divergence(_PLACE)
            self._pause, self._patience = self._patience, min(2 * self._patience, _MAX_PATIENCE)
        elif buckets:
            firsts = [self._leaves.tensor(bucket[0]) for bucket in buckets]
            self._group.open_aside({leaf.device for leaf in firsts if leaf is not None})
            self._running = BucketPipeline(self._group, self._leaves, buckets)
            if self.shard_store is not None:
                self._running.scatter_early(early, self.shard_store, shard_maps)

    def _find_shard_maps(self, buckets: Sequence[Sequence[int]], early: set[int]) -> dict[int, ShardMap]:
        """Return, for each bucket of which ranks need parts only, which rank needs which part."""
        shard_maps: dict[int, ShardMap] = {}
        if self.shard_store is None or not self._group.reduces_parts:
            return shard_maps
        for i, bucket in enumerate(buckets):
            leaves = [leaf for number in bucket if (leaf := self._leaves.tensor(number)) is not None]
            # Parts are summed in shared memory, so gradients on an accelerator are cut when they have arrived whole.
            has_parts = all(id(leaf) in early and leaf.is_cpu for leaf in leaves)
            shard_map = self.shard_store.bucket_shard_map(leaves) if has_parts else None
            if shard_map is not None:
                shard_maps[i] = shard_map
        return shard_maps

    def delay_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Hold back the buckets of ``leaves``, to which a backward inside the running one will add.

        Raises:
            LagomError: if one of these buckets has been sent already.
        """
        if self._running is not None:
            self._running.delay_leaves(leaves)

    def end(self) -> BucketPipeline | None:
        """Send the remaining buckets after the backward, and return the pipeline; None if it did not overlap."""
        running, self._running = self._running, None
        if running is not None:
            running.launch_rest()
        return running

    def abandon(self) -> None:
        """Send the remaining buckets of a failed backward, so that other ranks do not wait for them.

        Raises:
            LagomError: if they cannot be sent, for example since there is no memory for them.
        """
        running, self._running = self._running, None
        if running is not None:
            self._abandoned = running.moving  # keeps the memory alive until the sums have been written
            try:
                running.launch_rest()
            except CollectiveError:
                pass  # the backward's own error says more
            except Exception as error:
                raise LagomError(_UNSENT.format(error=f"{type(error).__name__}: {error}")) from error


_UNSENT = (
    "a backward failed, and then this rank could not send zeros in place of its gradients, for which the other ranks "
    "wait ({error}); so the program cannot go on after the error of that backward. If memory ran out, use smaller "
    "batches"
)


def _backward_key(numbers: Sequence[int], leaves: Sequence[torch.Tensor]) -> Key:
    """Return a key that is equal for backwards that reach the same leaves."""
    entries = [(n, leaf.dtype, leaf.shape, not leaf.is_cpu) for n, leaf in zip(numbers, leaves, strict=True)]
    return tuple(sorted(entries, key=itemgetter(0)))


def _sign(key: Key) -> bytes:
    return signature(_PLACE.encode() + repr(key).encode())


# Note [Overlap]
#
# A bucket may be sent during a backward only if all ranks will send it. The graph of a backward shows before it runs
# which leaves it will reach. Once a backward with large gradients has been the same on all ranks, later backwards
# (without create_graph) begin with an exchange: each rank sends a signature of the leaves that it will reach. All ranks
# make this exchange, since all know the earlier backwards. If all signatures are equal, and are that of an earlier
# backward, the buckets of its layout are summed in order, each as soon as its gradients are complete. Buckets have
# connections of their own, because other exchanges of the backward (statistics of BatchNorm) may come earlier or later
# on another rank. On accelerators the connections are another communicator, such as NCCL's, whose kernels run beside
# those of the backward. At the end of the backward, also of a failed one, the remaining buckets are sent, with zeros
# for leaves without a gradient. So all ranks send the same buckets in any case. The small gradients follow with a
# signature, as in any other backward. The gradient of a parameter that modules share is complete after its last use.
#
# With ``zero_lvl`` 2 and 3 a rank keeps only its part of an average. At level 2, if ranks share memory, it receives
# only this part; the signature at the start says so. Otherwise it receives whole sums and cuts them. Both happen while
# the backward runs, for buckets whose leaves have no hooks and no earlier gradients. With more than two buckets under
# way, the backward waits for the first, but only for a moment: another rank may send its part only after an exchange in
# which it waits for this rank. The sums do not depend on this wait.
#
# If the signatures differ, no bucket has been sent. The ranks continue without overlap, and pause the exchange at the
# start for more and more backwards (at most 64).
#
# A backward inside the backward (a re-entrant checkpoint) adds to leaves a second time. If a program has such
# checkpoints from the start, the outer graphs do not contain their leaves. So the leaves of a graph are never all the
# leaves of an earlier backward, and the program never overlaps.


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
