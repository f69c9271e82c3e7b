"""``draw_own_rows``: draw a rank's rows of a dropout mask, and skip the other rows' numbers. See Note [Skipping]."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from lagom.exchange.native import native
from lagom.patching.watched_operations import is_watched
from lagom.run_state.memory_layout import is_dense

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

_STATE_BYTES = 5056
"""Size of the state of torch's generator; ``csrc/twister.hpp`` describes its beginning."""

_MIN_PART = 128
"""Number of elements that lie side by side in memory, below which the whole mask is drawn: a call takes 1 us."""


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
    outer = _dimensions_around(mask, axis)
    num_parts = math.prod(mask.shape[dim] for dim in outer)
    if outer and not (is_dense(mask) and mask.numel() >= _MIN_PART * num_parts):
        return False
    # With micro-batches in a sliced forward, the forward's own ``Draws`` is active here: it must see the whole draw.
    if torch._C._len_torch_dispatch_stack() or is_watched() or not can_skip():
        return False
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not 0 <= probability <= 1:
        return False  # torch raises the error
    per_row = mask.numel() // mask.shape[axis] // num_parts
    num_mine = mask.shape[axis]
    mask.copy_(
        _drawn(
            torch.empty_like(mask, dtype=torch.bool),
            probability,
            kwargs.get("generator") or torch.default_generator,
            num_before * per_row,
            (num_all - num_before - num_mine) * per_row,
            num_parts,
        )
    )
    return True


def _drawn(
    mask: Tensor, probability: float, generator: torch.Generator, before: int, after: int, num_parts: int = 1
) -> Tensor:
    """Return ``mask`` of booleans, drawn in the order of its memory; skip the elements before and after each part."""
    state, size = generator.get_state(), mask.numel() // num_parts
    for start in range(mask.data_ptr(), mask.data_ptr() + size * num_parts, max(1, size)):
        native().draw_mask(state.data_ptr(), len(state), probability, before, start, size, after)
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


def _dimensions_around(mask: Tensor, axis: int) -> list[int]:
    """Return the dimensions that come before ``axis`` in memory, such as the steps of a recurrent network."""
    # A single row is judged by its stride too, which is not the largest if another dimension is first in memory.
    return [d for d in range(mask.dim()) if d != axis and mask.shape[d] > 1 and mask.stride(d) >= mask.stride(axis)]


# Note [Skipping]
#
# Each rank draws the numbers of one process (see ``Draws`` in draws.py), but needs only those of its rows.
# On CPUs torch draws a mask one element after the other, each from two numbers of a Mersenne Twister, which takes 7 to
# 16 ns. csrc/twister.cpp draws the same numbers in 2 ns, and skips an element in 0.6 ns. With MKL on Intel's CPUs,
# torch takes a single number of the twister for the whole mask, and draws the mask by another generator. can_skip finds
# that out by a trial; then every rank draws the whole mask.
