"""``AllReduceBucket`` and ``ReduceScatterBucket``: average large gradients in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.gradients.reduction.layout import wire_dtype
from lagom.run_state.memory_layout import flatten_like

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.exchange.background import Work


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
    found: list[torch.Tensor | None] = [None] * num_leaves
    sizes = [size for _, size in moving.shard_map.own]
    for (place, _), part in zip(moving.shard_map.own, moving.out.split(sizes) if sizes else (), strict=True):
        found[place] = part
    return found


def _is_sole_owner(gradient: torch.Tensor) -> bool:
    """Return whether no other tensor uses the memory of ``gradient``.

    A leaf's gradient may be a view of a tensor that the backward has yet to read, or share memory with another leaf's.
    """
    storage = gradient.untyped_storage()  # this reference counts as well
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2
