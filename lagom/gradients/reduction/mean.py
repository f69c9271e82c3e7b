"""``Mean``, and the choice of what makes one gradient out of those of all ranks. See Note [Reductions]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lagom.gradients.reduction.buckets import finish_all_reduce, start_all_reduce
from lagom.gradients.reduction.layout import travelling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lagom.collectives.group import Group
    from lagom.gradients.reduction.layout import Bucket, Layout, LayoutEntry


class Reduction(Protocol):
    """Makes one gradient of those of all ranks, in place; the same bits on all ranks."""

    is_linear: bool
    """What it gives for sums is the sum of what it gives, but for rounding: it can be differentiated as a mean."""
    overlaps: bool
    """It is a sum of what is given, so that sums may be taken while a backward runs."""

    def room(self, room: int) -> int:
        """Bytes of ``room`` beside the signature that gradients may use."""

    def travelling(self, dtype: torch.dtype) -> torch.dtype:
        """The type as which gradients of ``dtype`` are sent."""

    def is_apart(self, entry: LayoutEntry) -> bool:
        """Whether a gradient is not to go beside the signature, however small it is."""

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Reduce what is in ``layout.buckets``; a collective."""

    def forget(self, is_alive: Callable[[int], bool]) -> None:
        """Drop what is kept of leaves that are gone."""


class Mean:
    """The average."""

    is_linear = True
    overlaps = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def room(self, room: int) -> int:
        """All of it."""
        return room

    def travelling(self, dtype: torch.dtype) -> torch.dtype:
        """As they are, where gloo and NCCL can add them."""
        return travelling(dtype)

    def is_apart(self, entry: LayoutEntry) -> bool:
        """None is."""
        return False

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """All at once: a collective leaves much of the time to others."""
        self.average(layout.buckets, gradients)

    def average(self, buckets: Sequence[Bucket], gradients: Sequence[torch.Tensor]) -> None:
        """As ``reduce``, of some buckets."""
        world_size = self._group.world_size
        moving = [
            start_all_reduce([gradients[i] for i in bucket.indices], self._group.all_reduce_later, world_size)
            for bucket in buckets
        ]
        for one in moving:
            finish_all_reduce(one, self._group.wait, world_size)

    def forget(self, is_alive: Callable[[int], bool]) -> None:
        """Nothing is kept."""


def reduction(group: Group, compression: str | None, adaptive: bool) -> Reduction:
    """What ``gradient_compression`` and ``reduction="adasum"`` ask for."""
    from lagom.gradients.reduction.powersgd import PowerSGD
    from lagom.gradients.reduction.sliced import HALVES, Adasum, SlicedMean

    if compression == "powersgd":
        return PowerSGD(group)
    half = HALVES.get(compression or "")
    if adaptive:
        return Adasum(group, half)
    return SlicedMean(group, half) if half is not None else Mean(group)


# Note [Reductions]
#
# All gradients of backwards are averaged in one place, `Averager.average`: those of ordinary and steady backwards, what
# accumulation has kept, and what ZeRO cuts afterwards. There a `Reduction` stands between. What it may choose is the
# type that gradients have on their way, which of them may travel beside the signature, and what becomes of the rest.
# Signatures, agreement and the parameters' checksum are untouched, so a reduction must give the same bits on all ranks.
# Gradients that torch.autograd.grad returns, statistics and buffers are averaged as they are.
