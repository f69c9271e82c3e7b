"""Views of dense tensors as flat vectors in memory order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Iterable


storage_of = torch._C.TensorBase.untyped_storage
"""Returns a tensor's storage; with ``zero_lvl=3``, ``Tensor.untyped_storage`` would gather the parameter first."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether all elements have distinct places in memory, without gaps."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def find_overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of those dense ``tensors`` that share memory with another dense tensor among them."""
    overlapping: set[int] = set()
    together: list[int] = []
    reached = 0
    for start, end, key in sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, id(t)) for t in tensors if not is_lazy(t) and t.numel() and is_dense(t)
    ):
        together = [*together, key] if start < reached else [key]
        reached = max(reached, end)
        if len(together) > 1:
            overlapping.update(together)
    return overlapping


def resolve_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy of its values if it is lazily conjugated or negated, or torch's ZeroTensor."""
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of ``tensor`` in memory order, the outermost first.

    Return None if ``tensor`` is contiguous, or is not dense and so has no such order.
    """
    if tensor.layout != torch.strided or tensor.is_contiguous() or not is_dense(tensor):
        return None
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def flatten_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense ``tensor`` as a vector in memory order that shares its memory and version counter."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flatten_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` in the memory order of ``other``, which is dense and has the same shape.

    The result is a view if ``tensor`` has the same strides as ``other``, else a copy.
    """
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.stride() == other.stride() and is_dense(tensor):
        return flatten_memory(tensor)
    return flatten_memory(torch.empty_like(other, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach()))
