"""How gradients travel: ``Layout`` sorts them, buckets average large ones in the background, ``Mean`` combines all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from lagom.exchange.agreement_exchange import PackedTensors, signature
from lagom.run_state.memory_layout import flatten_like

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.exchange.background import Work
    from lagom.exchange.group import Group


class AllReduceBucket(NamedTuple):
    """A bucket whose gradients are being summed; each rank gets all sums."""

    work: Work
    flat: torch.Tensor
    gradients: list[torch.Tensor]
    views: list[torch.Tensor] | None
    """Views of ``flat``, one for each gradient; None if ``flat`` is the only gradient itself."""


def start_all_reduce(
    gradients: Sequence[torch.Tensor], all_reduce: Callable[[torch.Tensor], Work], world_size: int
) -> AllReduceBucket:
    """Begin to average ``gradients`` in place; do not use them before ``finish_all_reduce``.

    Args:
        gradients: gradients of one type on one device.
        all_reduce: begins to sum a flat tensor over the ranks.
    """
    first = gradients[0]
    dtype = wire_dtype(first.dtype)
    views = None
    if len(gradients) == 1 and first.is_contiguous() and dtype == first.dtype and _is_sole_owner(first):
        flat = first.view(-1)
    else:
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.empty(sum(sizes), dtype=dtype, device=first.device)
        views = [part.view(g.shape) for part, g in zip(flat.split(sizes), gradients, strict=True)]
        torch._foreach_copy_(views, list(gradients))
    if flat.element_size() < 4:  # in half precision the sum may overflow, so divide first
        flat.div_(world_size)
    return AllReduceBucket(all_reduce(flat), flat, list(gradients), views)


def finish_all_reduce(moving: AllReduceBucket, wait: Callable[[Work], None], world_size: int) -> None:
    """Wait for the sums, and write the averages into the gradients."""
    wait(moving.work)
    if moving.flat.element_size() >= 4:
        moving.flat.div_(world_size)
    if moving.views is not None:
        torch._foreach_copy_(moving.gradients, moving.views)


class ShardMap(NamedTuple):
    """Says which rank needs which elements of a bucket."""

    counts: list[int]
    """Number of elements that each rank needs."""
    pieces: list[tuple[int, int, int]]
    """Pieces of leaves, ordered by the rank that needs them: index of the leaf in the bucket, first element, end."""
    own: list[tuple[int, int]]
    """This rank's pieces: index of the leaf in the bucket, and number of elements."""


def make_shard_map(parts: Sequence[Sequence[tuple[int, int, int]]], rank: int, world_size: int) -> ShardMap:
    """Return the map of a bucket.

    Args:
        parts: for each leaf its parts, which cover the leaf: owner (a rank), first element, end.
    """
    pieces = sorted((owner, place, start, end) for place, row in enumerate(parts) for owner, start, end in row)
    counts = [0] * world_size
    for owner, _, start, end in pieces:
        counts[owner] += end - start
    own = [(place, end - start) for owner, place, start, end in pieces if owner == rank]
    return ShardMap(counts, [piece[1:] for piece in pieces], own)


class ReduceScatterBucket(NamedTuple):
    """A bucket whose gradients are being summed; each rank gets only the sums that it needs."""

    work: Work
    whole: torch.Tensor
    out: torch.Tensor
    """Receives this rank's sums; the same tensor as ``whole`` if this rank needs all of them."""
    shard_map: ShardMap


def start_reduce_scatter(
    gradients: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    shard_map: ShardMap,
    rank: int,
    reduce: Callable[[torch.Tensor, Sequence[int], torch.Tensor], Work],
) -> ReduceScatterBucket:
    """Begin to average ``gradients``, and to give each rank its parts; the gradients become invalid.

    Args:
        leaves: the leaves of ``gradients``.
        reduce: begins to sum a flat tensor; given the number of elements for each rank, it writes this rank's into the
            last argument.
    """
    is_all = shard_map.counts[rank] == sum(shard_map.counts)
    may_be_used = not is_all or _is_sole_owner(gradients[0])
    lines = [flatten_like(gradient, leaf) for gradient, leaf in zip(gradients, leaves, strict=True)]
    in_order = len(lines) == 1 and [start for _, start, _ in shard_map.pieces] == sorted(x[1] for x in shard_map.pieces)
    is_half = lines[0].element_size() < 4
    if in_order and not is_half and may_be_used:
        whole = lines[0]
    else:
        whole = torch.cat([lines[place][start:end] for place, start, end in shard_map.pieces])
    if is_half:  # in half precision the sum may overflow, so divide first
        whole.div_(len(shard_map.counts))
    out = whole if is_all else whole.new_empty(shard_map.counts[rank])
    return ReduceScatterBucket(reduce(whole, shard_map.counts, out), whole, out, shard_map)


def finish_reduce_scatter(
    moving: ReduceScatterBucket, wait: Callable[[Work], None], num_leaves: int
) -> list[torch.Tensor | None]:
    """Wait, and return for each leaf this rank's part of the average; None if this rank needs nothing of the leaf."""
    wait(moving.work)
    if moving.out.element_size() >= 4:
        moving.out.div_(len(moving.shard_map.counts))
    shards: list[torch.Tensor | None] = [None] * num_leaves
    sizes = [size for _, size in moving.shard_map.own]
    for (place, _), part in zip(moving.shard_map.own, moving.out.split(sizes) if sizes else (), strict=True):
        shards[place] = part
    return shards


def _is_sole_owner(gradient: torch.Tensor) -> bool:
    """Return whether no other tensor uses the memory of ``gradient``.

    A leaf's gradient may be a view of a tensor that the backward has yet to read, or share memory with another leaf's.
    """
    storage = gradient.untyped_storage()  # this reference counts as well
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


ALONE = 1 << 20
"""Bytes from which a gradient has a bucket of its own: copying it would take longer than another exchange."""
TOGETHER = 4 << 20
"""Bytes of smaller gradients that fill a bucket."""


class LayoutEntry(NamedTuple):
    """The facts about one gradient on which all ranks must agree."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    sparse: bool
    """Whether the gradient is sparse, or in the layout of oneDNN."""
    on_device: bool
    """Whether the gradient is on an accelerator."""


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type and kind of device that travel together, by their indices in the layout."""

    indices: list[int]


class Layout:
    """Sorts gradients by their way: with the signature (small), in a bucket (other dense ones), or alone.

    Args:
        kind: name of the exchange.
        entries: the gradients, in the order in which they will be passed.
        room: bytes for gradients in the message with the signature.
        reduction: how gradients are combined; None for the mean.
    """

    def __init__(self, kind: str, entries: list[LayoutEntry], room: int, reduction: Reduction | None = None) -> None:
        as_type = wire_dtype if reduction is None else reduction.wire_dtype
        self.reduction = reduction
        self.entries = entries
        self.numbers = [entry.number for entry in entries]
        # Sorted, since ranks may walk equal graphs in different orders.
        self.order = sorted(range(len(entries)), key=self.numbers.__getitem__)
        self.identity = repr((kind, [entries[i] for i in self.order])).encode()
        self.signature = signature(self.identity)
        self.is_new = True
        self.unseen: list[int] = []
        self.framed: list[int] = []
        self.sparse: list[int] = []
        rest: dict[tuple[bool, torch.dtype], list[int]] = {}
        for i in self.order:
            entry = entries[i]
            size = entry.shape.numel() * as_type(entry.dtype).itemsize
            if entry.sparse:
                self.sparse.append(i)
            elif not entry.on_device and size <= room:
                self.framed.append(i)
                room -= size
            else:
                rest.setdefault((entry.on_device, entry.dtype), []).append(i)
        self.packed = PackedTensors([(entries[i].dtype, entries[i].shape) for i in self.framed], as_type)
        # Reversed, since a backward reaches the last parameters first.
        self.buckets = [bucket for part in rest.values() for bucket in _make_buckets(part[::-1], entries)]
        sizes = [0, 0]
        for (on_device, dtype), part in rest.items():
            sizes[on_device] += sum(entries[i].shape.numel() for i in part) * dtype.itemsize
        self.on_cpu, self.on_device = sizes
        """Bytes of all buckets on the CPU, and on accelerators."""


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of ``dtype`` are sent: one that gloo and NCCL can add."""
    return dtype if dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16) else torch.float32


def _make_buckets(indices: list[int], entries: list[LayoutEntry]) -> list[Bucket]:
    buckets: list[Bucket] = []
    together: list[int] = []
    num_bytes = 0
    for i in indices:
        size = entries[i].shape.numel() * entries[i].dtype.itemsize
        if size >= ALONE:
            buckets.append(Bucket([i]))
            continue
        together.append(i)
        num_bytes += size
        if num_bytes >= TOGETHER:
            buckets.append(Bucket(together))
            together, num_bytes = [], 0
    return [*buckets, Bucket(together)] if together else buckets


class Reduction(Protocol):
    """Combines the gradients of all ranks in place; the result has the same bits on all ranks."""

    is_linear: bool
    """Whether the reduction of a sum is the sum of reductions, except for rounding."""
    overlaps: bool
    """Whether the reduction is a plain mean, so that buckets may be summed while the backward runs."""

    def frame_bytes(self, room: int) -> int:
        """Return how many of the ``room`` bytes in the message with the signature gradients may use."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which gradients of ``dtype`` are sent."""

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Combine the gradients in ``layout.buckets``, in place; a collective if there are any."""


class Mean:
    """Averages gradients without compression."""

    is_linear = True
    overlaps = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def frame_bytes(self, room: int) -> int:
        """Return ``room``: gradients may use all of it."""
        return room

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return ``dtype`` if gloo and NCCL can add it, else float32."""
        return wire_dtype(dtype)

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Average the gradients in ``layout.buckets``; a collective.

        All travel at the same time, since an exchange is mostly waiting.
        """
        world_size = self._group.world_size
        moving = [
            start_all_reduce([gradients[i] for i in bucket.indices], self._group.all_reduce_later, world_size)
            for bucket in layout.buckets
        ]
        for one in moving:
            finish_all_reduce(one, self._group.wait, world_size)


def make_reduction(group: Group, compression: str | None, adaptive: bool) -> Reduction:
    """Return the reduction for a config.

    Args:
        compression: the config's ``gradient_compression``.
        adaptive: whether the config has ``reduction="adasum"``.
    """
    if compression is None and not adaptive:
        return Mean(group)
    from lagom.gradients.reduction.sliced import HALVES, Adasum, SlicedMean

    half = HALVES.get(compression or "")
    if adaptive:
        return Adasum(group, half)
    return SlicedMean(group, half)


# Note [Reductions]
#
# Gradients of backwards are averaged in one place, `TensorAverager.average`: those of ordinary and cached backwards,
# postponed sums of accumulation, and gradients that ZeRO cuts afterwards. Only buckets that are sent while a backward
# runs are not (`overlap.py`); they need a `Reduction` that `overlaps`. The `Reduction` chooses in which type
# gradients travel, how many of them travel with the signature, and how the others are combined. It does not change
# signatures and agreement. The checksums of parameters are compared as ever, so a reduction must give the same bits on
# all ranks. Sparse gradients (which Adasum refuses), gradients of torch.autograd.grad and statistics are averaged by
# the mean in any case. Buffers are copied from rank 0.
