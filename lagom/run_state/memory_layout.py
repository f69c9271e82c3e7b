"""Tensors as the line of elements that they are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Iterable


storage_of = torch._C.TensorBase.untyped_storage


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


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Ids of those dense ones among ``tensors`` that have memory in common with another of them."""
    found: set[int] = set()
    together: list[int] = []
    reached = 0
    for start, end, key in sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, id(t)) for t in tensors if not is_lazy(t) and t.numel() and is_dense(t)
    ):
        together = [*together, key] if start < reached else [key]
        reached = max(reached, end)
        if len(together) > 1:
            found.update(together)
    return found


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
