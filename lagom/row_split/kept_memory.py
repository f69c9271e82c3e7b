"""``KeptMemory``: memory of large tensors, used again once a tensor is gone: new pages take longer than an exchange."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_MIN_BYTES = 1 << 20
"""Smaller tensors have memory of torch's allocator, which keeps theirs."""
_MAX_KEPT = 4
"""Number of pieces of memory that are kept: as many large outputs as a step may have, and that of the step before."""


class KeptMemory:
    """Makes tensors on the CPU, uninitialised, of memory that earlier ones had."""

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque(maxlen=_MAX_KEPT)
        self._users_if_free = _count_users(torch.empty(1))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, as ``torch.empty`` does."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes < _MIN_BYTES:
            return torch.empty(shape, dtype=dtype)
        # Of exactly this size: torch.save writes all memory that a tensor has.
        piece = next((one for one in self._kept if one.nbytes == num_bytes and self._is_free(one)), None)
        if piece is None:
            piece = torch.empty(num_bytes, dtype=torch.uint8)
            self._kept.append(piece)
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        # Not a view: the output of a function of autograd that is one cannot be changed in place.
        return torch.empty(0, dtype=dtype).set_(piece.untyped_storage(), 0, shape, stride)

    def _is_free(self, piece: Tensor) -> bool:
        """Return whether nothing but ``piece`` uses its memory, and nobody has resized it or sent it to a process."""
        if _count_users(piece) != self._users_if_free:
            return False
        storage = piece.untyped_storage()
        return storage.nbytes() == piece.nbytes and not storage.is_shared()


def _count_users(piece: Tensor) -> tuple[int, int]:
    """Return how many tensors use the memory of ``piece``, and how many names its storage has in Python.

    Both numbers are larger by what counts in this function itself, which depends on the version of torch.
    """
    storage = piece.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
