"""``Reduction``, the interface for combining the gradients of all ranks, and ``Mean``. See Note [Reductions]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lagom.gradients.reduction.buckets import finish_all_reduce, start_all_reduce
from lagom.gradients.reduction.layout import wire_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lagom.exchange.group import Group
    from lagom.gradients.reduction.layout import Layout


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
# runs are not (`bucket_pipeline.py`); they need a `Reduction` that `overlaps`. The `Reduction` chooses in which type
# gradients travel, how many of them travel with the signature, and how the others are combined. It does not change
# signatures and agreement. The checksums of parameters are compared as ever, so a reduction must give the same bits on
# all ranks. Sparse gradients (which Adasum refuses), gradients of torch.autograd.grad and statistics are averaged by
# the mean in any case. Buffers are copied from rank 0.
