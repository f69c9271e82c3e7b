"""``draw_own_rows``: draw a rank's rows of a dropout mask, and skip the other rows' numbers. See Note [Skipping]."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lagom.exchange.native import native
from lagom.patching.watched_operations import is_watched

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

_STATE_BYTES = 5056
"""Size of the state of torch's generator; ``csrc/twister.hpp`` describes its beginning."""


def draw_own_rows(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], axis: int, num_before: int, num_all: int
) -> bool:
    """Fill ``args[0]``, some rows of a mask, with the numbers that a draw of the whole mask would give them.

    Args:
        function: the operation that draws in place.
        axis: dimension of the rows.
        num_before: number of rows before those in ``args[0]``.
        num_all: number of rows of the whole mask.

    Returns:
        False if nothing was drawn, because numbers of this kind cannot be skipped.
    """
    mask: Tensor = args[0]
    if function is not torch.ops.aten.bernoulli_.float or type(mask) is not torch.Tensor or not mask.is_cpu:
        return False  # a tensor of another class may have no memory
    if not _lies_by_rows(mask, axis):
        return False
    # With micro-batches in a sliced forward, the forward's own ``Draws`` is active here: it must see the whole draw.
    if torch._C._len_torch_dispatch_stack() or is_watched() or not can_skip():
        return False
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not 0 <= probability <= 1:
        return False  # torch raises the error
    per_row = mask.numel() // mask.shape[axis]
    mask.copy_(
        _drawn(
            torch.empty_like(mask, dtype=torch.bool),
            probability,
            kwargs.get("generator") or torch.default_generator,
            before=num_before * per_row,
            after=(num_all - num_before) * per_row - mask.numel(),
        )
    )
    return True


def _drawn(mask: Tensor, probability: float, generator: torch.Generator, before: int, after: int) -> Tensor:
    """Return ``mask`` of booleans, drawn in the order of its memory; skip the elements before and after it."""
    state = generator.get_state()
    native().draw_mask(state.data_ptr(), len(state), probability, before, mask.data_ptr(), mask.numel(), after)
    generator.set_state(state)
    return mask


@functools.cache
def can_skip() -> bool:
    """Return whether parts of a mask can be drawn one by one on this machine, and are those that torch draws."""
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    if native() is None or len(one.get_state()) != _STATE_BYTES:
        return False
    # The program may have set another default dtype or device.
    whole = torch.empty(2000, dtype=torch.bool, device="cpu").bernoulli_(0.5, generator=one)
    part = _drawn(torch.empty(600, dtype=torch.bool, device="cpu"), 0.5, other, 700, 700)
    return torch.equal(whole[700:1300], part) and torch.equal(one.get_state(), other.get_state())


def _lies_by_rows(mask: Tensor, axis: int) -> bool:
    """Return whether the elements of a row are side by side in memory, and drawn one after the other."""
    # A single row is judged by its stride too, which is not the largest if another dimension is first in memory.
    return all(mask.stride(axis) > mask.stride(d) for d in range(mask.dim()) if d != axis and mask.shape[d] > 1)


# Note [Skipping]
#
# Each rank draws the numbers of one process (see ``Draws`` in draws.py), but needs only those of its rows.
# On CPUs torch draws a mask one element after the other, each from two numbers of a Mersenne Twister, which takes 7 to
# 16 ns. csrc/twister.cpp draws the same numbers in 2 ns, and skips an element in 0.6 ns. With MKL on Intel's CPUs,
# torch takes a single number of the twister for the whole mask, and draws the mask by another generator. can_skip finds
# that out by a trial; then every rank draws the whole mask.
