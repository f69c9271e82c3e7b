"""``KeptMemory``: reuses the memory of freed large tensors, since new pages would take longer than an exchange."""

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
"""Size below which tensors come from torch's allocator, which reuses small blocks itself."""
_MAX_BYTES = 1 << 28
"""Most bytes of free memory that are kept."""


class KeptMemory:
    """Makes uninitialised tensors on the CPU, in the memory of freed tensors if possible."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.RLock()  # reentrant: a tensor may be freed at any time, also during `empty`

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor, as ``torch.empty`` does; a tensor of 1 MB or more cannot be resized."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes < _MIN_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        piece = self._take(num_bytes)
        # The storage holds `lent`, so the memory is given back when the last user of the storage is gone. Programs may
        # hold weak references to storages, so each tensor needs a new storage.
        lent = piece[:]
        weakref.finalize(lent, self._give_back, piece).atexit = False
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        # Not a view: an autograd function's output that is a view cannot be changed in place.
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            torch.from_numpy(lent).untyped_storage(), 0, shape, stride
        )

    def _take(self, num_bytes: int) -> np.ndarray:
        with self._lock:
            # Only memory of exactly this size is reused: torch.save writes the whole storage.
            index = next((i for i, free in enumerate(self._free) if len(free) == num_bytes), None)
            if index is not None:
                return self._free.pop(index)
            # Align memory as torch does: the results of libraries' sums may depend on alignment.
            aligned: np.ndarray = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
            return aligned

    def _give_back(self, piece: np.ndarray) -> None:
        with self._lock:
            self._free.append(piece)
            while self._free and sum(map(len, self._free)) > _MAX_BYTES:
                del self._free[0]
