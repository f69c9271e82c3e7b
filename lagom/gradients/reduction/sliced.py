"""``SlicedMean`` and ``Adasum``: each rank combines a slice of the gradients of all ranks, and gives the result to all.

See Note [Slices].
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from lagom.errors import LagomError
from lagom.gradients.reduction.layout import travelling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.gradients.reduction.layout import Bucket, Layout, LayoutEntry

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ALIGNED = 16
"""Elements that a slice is a multiple of: 16 bytes, at least, for any type."""


class SliceGroup(Protocol):
    """Collectives that slices need; those of ``Group``, or of any other set of ranks."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write the ``part`` of each rank into ``whole``, in rank order."""

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row i to rank i; return the rows received, in rank order."""


class _Slices(NamedTuple):
    """A bucket, cut across all ranks."""

    gradients: list[torch.Tensor]
    flat: torch.Tensor
    """Of the type that travels, with zeros at its end, where the results go in the end."""
    rows: torch.Tensor
    """Of shape (ranks, elements of a slice): this rank's slice of the gradients of each."""
    bounds: list[int]
    """Where each gradient begins in ``flat``, and the last one ends."""


class _Sliced:
    def __init__(self, group: SliceGroup, half: torch.dtype | None) -> None:
        self._group = group
        self._half = half

    def travelling(self, dtype: torch.dtype) -> torch.dtype:
        """As halves where that is asked for."""
        own = travelling(dtype)
        return own if self._half is None or own.itemsize <= self._half.itemsize else self._half

    def is_apart(self, entry: LayoutEntry) -> bool:
        """None is."""
        return False

    def forget(self, is_alive: Callable[[int], bool]) -> None:
        """Nothing is kept."""

    def _cut(self, bucket: Bucket, gradients: Sequence[torch.Tensor]) -> _Slices:
        found = [gradients[i] for i in bucket.indices]
        sizes = [one.numel() for one in found]
        world_size = self._group.world_size
        size = -(-sum(sizes) // (world_size * _ALIGNED)) * _ALIGNED
        flat = torch.zeros(world_size * size, dtype=self.travelling(found[0].dtype), device=found[0].device)
        torch._foreach_copy_(_views(flat, found), found)
        rows = self._group.all_to_all(flat.view(world_size, size))
        bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
        return _Slices(found, flat, rows, bounds)

    def _share(self, slices: _Slices, result: torch.Tensor) -> None:
        """Give the others ``result``, this rank's slice, and take theirs."""
        part = result.to(slices.flat.dtype)
        self._group.all_gather_into(slices.flat.view(torch.uint8), part.view(torch.uint8))
        torch._foreach_copy_(slices.gradients, _views(slices.flat, slices.gradients))


class SlicedMean(_Sliced):
    """The average, of what halves on the wire keep of gradients; added as float32."""

    is_linear = True
    overlaps = False

    def room(self, room: int) -> int:
        """All of it: what travels beside the signature is added as float32 as well."""
        return room

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Average what is in ``layout.buckets``; a collective."""
        for bucket in layout.buckets:
            slices = self._cut(bucket, gradients)
            self._share(slices, slices.rows.float().sum(dim=0).div_(self._group.world_size))


class Adasum(_Sliced):
    """Gradients of ranks that point the same way are averaged, those at right angles added. See Note [Adasum]."""

    is_linear = False
    overlaps = False

    def room(self, room: int) -> int:
        """None: what travels there is averaged."""
        return 0

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Combine what is in ``layout.buckets``; a collective.

        Raises:
            LagomError: on all ranks, where gradients are sparse.
        """
        if layout.sparse:
            raise LagomError(
                "reduction='adasum' has no rule for sparse gradients, and an embedding with sparse=True has them; "
                "use sparse=False, or reduction='mean'"
            )
        if layout.buckets:
            self.combine(layout.buckets, gradients)

    def combine(self, buckets: Sequence[Bucket], gradients: Sequence[torch.Tensor]) -> None:
        """Combine the gradients that ``buckets`` name, in place; a collective."""
        found = [self._cut(bucket, gradients) for bucket in buckets]
        parts = [list(_computable(slices.rows)) for slices in found]
        segments = [self._segments(slices) for slices in found]
        for _ in range((self._group.world_size - 1).bit_length()):
            parts = self._paired(parts, segments)
        for slices, (result,) in zip(found, parts, strict=True):
            self._share(slices, result)

    def _segments(self, slices: _Slices) -> list[tuple[int, int]]:
        """First and last element of each gradient in this rank's slice."""
        size = slices.rows.shape[1]
        start = self._group.rank * size
        places = [min(max(bound - start, 0), size) for bound in slices.bounds]
        return list(pairwise(places))

    def _paired(
        self, parts: list[list[torch.Tensor]], segments: list[list[tuple[int, int]]]
    ) -> list[list[torch.Tensor]]:
        """One level of the tree: the first with the second, the third with the fourth; a last one is left over."""
        pairs = [
            (own[i], own[i + 1], places) for own, places in zip(parts, segments, strict=True) for i in _firsts(own)
        ]
        # Of a slice, which lacks the rest of each gradient.
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


def _computable(rows: torch.Tensor) -> torch.Tensor:
    """A copy, or what was received: it is overwritten."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _firsts(own: Sequence[torch.Tensor]) -> range:
    return range(0, len(own) - 1, 2)


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a.b, a.a and b.b, as float64."""
    a, b = a.double(), b.double()
    return torch.stack([a.dot(b), a.dot(a), b.dot(b)])


def _weights(products: torch.Tensor) -> torch.Tensor:
    """What to multiply the two of each pair by; that of a gradient of zeros does not matter, and is 1 for both."""
    both, squares = products[:, :1], products[:, 1:]
    return torch.where(squares == 0, 1.0, 1 - both / (2 * squares))


# Note [Slices]
#
# A sum that gloo or NCCL takes of halves is rounded in each of its steps. So it is not taken by them: of n ranks, each
# gets an n-th of the gradients of all (an all-to-all), combines these as float32, and gives the result to all (an
# all-gather). That sends what a ring does for a sum, (n - 1) / n of all gradients twice, and as halves half the bytes
# of float32. All ranks, also the one that computed it, take the result as it travels: the same bits everywhere.
#
# Note [Adasum]
#
# Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924). Of two gradients
#     Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,
# for each parameter by itself; of more, over a tree: of Adasum(g0, g1) and Adasum(g2, g3), and so on. The paper has
# powers of two; otherwise a gradient that finds no partner goes on to the next level. Where one of the two is zero (a
# rank without a sample in the tail of an epoch) the result is the other. Products are taken of slices and added over
# the ranks, three numbers for each parameter and pair, once for each level of the tree.
