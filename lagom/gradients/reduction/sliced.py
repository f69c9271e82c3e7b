"""``SlicedMean`` and ``Adasum``: each rank combines one slice of all ranks' gradients, and sends the result to all.

See Note [Slices].
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from lagom.errors import LagomError
from lagom.gradients.reduction.buckets import wire_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.gradients.reduction.buckets import Bucket, Layout

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ALIGNED = 16
"""The length of a slice is a multiple of this many elements, so at least 16 bytes for any type."""


class SliceGroup(Protocol):
    """The collectives that slices need, as ``Group`` has them."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write the ``part`` of each rank into ``whole``, in rank order."""

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row i to rank i; return the rows received, in rank order."""


class _Slices(NamedTuple):
    """A bucket after the all-to-all: this rank has one slice of the gradients of all ranks."""

    gradients: list[torch.Tensor]
    flat: torch.Tensor
    """The gradients in the type in which they travel, padded with zeros; receives the results."""
    rows: torch.Tensor
    """This rank's slice of each rank's gradients, of shape (ranks, elements of a slice)."""
    bounds: list[int]
    """First element of each gradient in ``flat``, and the end of the last gradient."""


class _SlicedReduction:
    def __init__(self, group: SliceGroup, half: torch.dtype | None) -> None:
        self._group = group
        self._half = half

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the half-precision type, if one was asked for and is shorter, else the type that can be added."""
        own = wire_dtype(dtype)
        return own if self._half is None or own.itemsize <= self._half.itemsize else self._half

    def _make_slices(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> _Slices:
        found = [gradients[i] for i in bucket.indices]
        sizes = [one.numel() for one in found]
        world_size = self._group.world_size
        size = -(-sum(sizes) // (world_size * _ALIGNED)) * _ALIGNED
        flat = torch.zeros(world_size * size, dtype=self.wire_dtype(found[0].dtype), device=found[0].device)
        torch._foreach_copy_(_views(flat, found), found)
        rows = self._group.all_to_all(flat.view(world_size, size))
        bounds = torch.tensor([0, *sizes], device="cpu").cumsum(0).tolist()
        return _Slices(found, flat, rows, bounds)

    def _exchange_slices(self, slices: _Slices, result: torch.Tensor) -> None:
        """Exchange the results of all slices, and write them into the gradients.

        Args:
            result: the combined slice of this rank.
        """
        part = result.to(slices.flat.dtype)
        self._group.all_gather_into(slices.flat.view(torch.uint8), part.view(torch.uint8))
        torch._foreach_copy_(slices.gradients, _views(slices.flat, slices.gradients))


class SlicedMean(_SlicedReduction):
    """Averages gradients that travel in half precision, and adds them in float32."""

    is_linear = True
    overlaps = False

    def frame_bytes(self, room: int) -> int:
        """Return ``room``: gradients with the signature are added in float32 as well."""
        return room

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Average the gradients in ``layout.buckets``; a collective."""
        for bucket in layout.buckets:
            slices = self._make_slices(bucket, gradients)
            self._exchange_slices(slices, slices.rows.float().sum(dim=0).div_(self._group.world_size))


class Adasum(_SlicedReduction):
    """Averages gradients of ranks that point the same way, and adds orthogonal ones. See Note [Adasum]."""

    is_linear = False
    overlaps = False

    def frame_bytes(self, room: int) -> int:
        """Return 0: gradients with the signature would be averaged."""
        return 0

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Combine the gradients in ``layout.buckets``; a collective.

        Raises:
            LagomError: on all ranks, if gradients are sparse.
        """
        if layout.sparse:
            raise LagomError(
                "reduction='adasum' has no rule for sparse gradients, which an embedding with sparse=True has, nor for "
                "gradients of tensors from to_mkldnn(); use sparse=False and dense tensors, or reduction='mean'"
            )
        if layout.buckets:
            self.combine(layout.buckets, gradients)

    def combine(self, buckets: Sequence[Bucket], gradients: Sequence[torch.Tensor]) -> None:
        """Combine the gradients that ``buckets`` name, in place; a collective."""
        found = [self._make_slices(bucket, gradients) for bucket in buckets]
        parts = [list(_to_float32(slices.rows)) for slices in found]
        segments = [self._segments(slices) for slices in found]
        for _ in range((self._group.world_size - 1).bit_length()):
            parts = self._combine_pairs(parts, segments)
        for slices, (result,) in zip(found, parts, strict=True):
            self._exchange_slices(slices, result)

    def _segments(self, slices: _Slices) -> list[tuple[int, int]]:
        """Return first element and end of each gradient within this rank's slice."""
        size = slices.rows.shape[1]
        start = self._group.rank * size
        places = [min(max(bound - start, 0), size) for bound in slices.bounds]
        return list(pairwise(places))

    def _combine_pairs(
        self, parts: list[list[torch.Tensor]], segments: list[list[tuple[int, int]]]
    ) -> list[list[torch.Tensor]]:
        """Combine one level of the tree: the first with the second, the third with the fourth; a last one is kept."""
        pairs = [
            (own[i], own[i + 1], places) for own, places in zip(parts, segments, strict=True) for i in _firsts(own)
        ]
        # Products over this rank's slice only; the sum over ranks completes them.
        own = [_products(a[s:e], b[s:e]) for a, b, places in pairs for s, e in places]
        products = torch.stack([one.to(own[0].device) for one in own])
        self._group.all_reduce(products)
        weights = _weights(products)
        place = 0
        for a, b, places in pairs:
            for s, e in places:
                first, second = weights[place].to(a.device)
                a[s:e].mul_(first).add_(b[s:e] * second)
                place += 1
        return [own[::2] for own in parts]


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [one.numel() for one in like]
    return [part.view(one.shape) for part, one in zip(flat[: sum(sizes)].split(sizes), like, strict=True)]


def _to_float32(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` in float32 or float64; the caller overwrites the result."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _firsts(own: Sequence[torch.Tensor]) -> range:
    return range(0, len(own) - 1, 2)


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a.b, a.a and b.b as a float64 tensor of shape (3,)."""
    a, b = a.double(), b.double()
    return torch.stack([a.dot(b), a.dot(a), b.dot(b)])


def _weights(products: torch.Tensor) -> torch.Tensor:
    """Return the weights for the two gradients of each pair, of shape (pairs, 2); 1 for a gradient of zeros."""
    both, squares = products[:, :1], products[:, 1:]
    return torch.where(squares == 0, 1.0, 1 - both / (2 * squares))


# Note [Slices]
#
# gloo and NCCL would round a sum of half-precision numbers in each of their steps. So lagom sums differently: each of n
# ranks gets one n-th of the gradients of all ranks (an all-to-all), combines these in float32, and sends the result to
# all ranks (an all-gather). This sends as much as a ring does for a sum: (n - 1) / n of all gradients twice, in half
# precision half of float32's bytes. All ranks, also the one that computed a slice, use the result after its conversion
# to the type in which it travels, so all have the same bits.
#
# Note [Adasum]
#
# Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924). Of two gradients
#     Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,
# for each parameter by itself. More gradients are combined in a tree: Adasum of Adasum(g0, g1) and Adasum(g2, g3), and
# so on. The paper assumes a power of two; for other numbers a gradient without a partner moves to the next level. If
# one of two gradients is zero (a rank without a sample in the tail of an epoch), the result is the other. Each rank
# computes the products over its slice, and the ranks add them: three numbers for each parameter and pair, once for each
# level of the tree.
