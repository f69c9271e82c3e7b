"""Adaptive summation: between a sum, for gradients at right angles, and a mean, for parallel ones.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, https://arxiv.org/abs/2006.02924. For two
gradients a and b, equation 4 there::

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

and for more, by pairs of pairs: adasum(adasum(g0, g1), adasum(g2, g3)).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LEAST = math.sqrt(sys.float_info.min)
"""Of a squared length: less is nothing, and takes nothing from the other."""


def combined(a: Tensor, b: Tensor) -> Tensor:
    """The adaptive sum of two tensors of one shape; products are added up in double precision."""
    x, y = a.double().flatten(), b.double().flatten()
    dot, a_squared, b_squared = float(x @ y), float(x @ x), float(y @ y)
    a_share = 1.0 - dot / a_squared / 2 if a_squared >= _LEAST else 1.0
    b_share = 1.0 - dot / b_squared / 2 if b_squared >= _LEAST else 1.0
    return (a_share * x + b_share * y).to(a.dtype).reshape(a.shape)


def adasum(tensors: Sequence[Tensor], rank: int, size: int, swapped: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """The adaptive sums of what all ranks have, for each of ``tensors`` by itself; bit for bit equal on all ranks.

    Args:
        size: of the ranks, a power of two.
        swapped: gives a flat tensor to a rank, and returns what that one gives.
    """
    found = [tensor.clone() for tensor in tensors]
    distance = 1
    while distance < size:
        other = rank ^ distance
        theirs = swapped(torch.cat([tensor.flatten() for tensor in found]), other)
        parts = theirs.split([tensor.numel() for tensor in found])
        pairs = [(mine, part.reshape(mine.shape)) for mine, part in zip(found, parts, strict=True)]
        # Both of a pair add up in the same order, and so to the same bits.
        found = [combined(*(pair if rank < other else pair[::-1])) for pair in pairs]
        distance *= 2
    return found


def is_power_of_two(size: int) -> bool:
    """Whether that many ranks can be paired, and the pairs, and so on."""
    return size > 0 and size & (size - 1) == 0
