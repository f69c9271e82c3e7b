"""``KeptMemory``: memory of large tensors, used again once a tensor is gone: new pages take longer than an exchange."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_MIN_BYTES = 1 << 20
"""Smaller tensors have memory of torch's allocator, which keeps theirs."""
_MAX_BYTES = 1 << 28
"""Bytes of free memory that are kept."""


class KeptMemory:
    """Makes tensors on the CPU, uninitialised, of memory that earlier ones had."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.RLock()  # the end of a tensor may come at any time, also in `empty`

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, as ``torch.empty`` does; one of 1 MB or more cannot be resized."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes < _MIN_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        piece = self._take(num_bytes)
        # A storage of its own, which keeps `lent` as long as anything uses it: programs refer weakly to storages.
        lent = piece[:]
        weakref.finalize(lent, self._give_back, piece).atexit = False
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        # Not a view: the output of a function of autograd that is one cannot be changed in place.
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            torch.from_numpy(lent).untyped_storage(), 0, shape, stride
        )

    def _take(self, num_bytes: int) -> np.ndarray:
        with self._lock:
            # Of exactly this size: torch.save writes all memory that a tensor has.
            index = next((i for i, free in enumerate(self._free) if len(free) == num_bytes), None)
            if index is not None:
                return self._free.pop(index)
            # Aligned as torch's own tensors are: sums of libraries may depend on that.
            aligned: np.ndarray = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
            return aligned

    def _give_back(self, piece: np.ndarray) -> None:
        with self._lock:
            self._free.append(piece)
            while self._free and sum(map(len, self._free)) > _MAX_BYTES:
                del self._free[0]
