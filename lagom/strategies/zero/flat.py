"""Tensors as the line of elements that they are in memory."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element has a place of its own in memory, with no gaps between them."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense ``tensor`` in the order of memory; the same memory, and the same version counter."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """All elements of ``tensor`` in the order in which ``other``, of the same shape and dense, has them in memory.

    A view where that is how ``tensor`` has them, else a copy.
    """
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.stride() == other.stride() and is_dense(tensor):
        return flat(tensor)
    return flat(torch.empty_like(other, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach()))
