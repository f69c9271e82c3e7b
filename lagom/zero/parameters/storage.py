"""``ParameterStorage``: the memory of one parameter, of which each rank has a part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lagom.gradients.checksum import hash_values
from lagom.run_state.memory_layout import is_dense, storage_of

_ALIGNED = 64
"""Alignment of the parts, in bytes."""


class StorageVersion(NamedTuple):
    """Version of a parameter's values: if it is equal on two ranks, their parts are of the same values."""

    total: int
    """Digest of all bits, after the last change that was made to the whole."""
    num_steps: int
    """Optimizer steps since then."""


class ParameterStorage:
    """Keeps this rank's part of one parameter's memory, which is cut into ``chunk`` bytes for each rank.

    Args:
        key: name of the unit, equal on all ranks.
    """

    def __init__(self, key: bytes, tensor: torch.Tensor, world_size: int) -> None:
        storage = storage_of(tensor)
        self.key = key
        self.num_bytes = storage.nbytes()
        self.chunk = -(-self.num_bytes // (world_size * _ALIGNED)) * _ALIGNED
        self.room = self.chunk * world_size
        self.place = storage._cdata
        self.shard: torch.Tensor | None = None
        """This rank's part; None as long as the whole has never been freed."""
        self.is_whole = True
        self.is_changed = True
        """Whether the whole has other values than the parts."""
        self.version = StorageVersion(0, 0)
        self.seen = 0
        """Digest of all bits at the last check, while ``is_held``."""
        self.is_held = False
        """Whether the storage's memory may be in use by address."""
        self.is_shown = False
        """Whether the storage's memory may be in use by address for good."""
        self._ref = StorageWeakRef(storage)

    @property
    def is_alive(self) -> bool:
        """Whether a tensor has this memory."""
        return not self._ref.expired()

    def storage(self) -> torch.UntypedStorage:
        """Return the storage that ``is_alive`` asks for, without keeping it alive afterwards."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        assert found is not None
        return found

    def part(self, rank: int) -> tuple[int, int]:
        """Return the start and end of ``rank``'s part, in bytes."""
        return min(rank * self.chunk, self.num_bytes), min((rank + 1) * self.chunk, self.num_bytes)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` covers the whole storage (is not a partial view)."""
        return tensor.storage_offset() == 0 and tensor.nbytes == self.num_bytes and is_dense(tensor)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Return the first ``num_bytes`` bytes of the whole."""
        storage = self.storage()
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (num_bytes,), (1,))

    def digest_values(self) -> int:
        """Return a digest of all bits by position: swapped rows are other values, which a sum would not show."""
        return int.from_bytes(hash_values(self.bytes(self.num_bytes)), "little")

    def update_part(self, rank: int) -> None:
        """Copy this rank's part out of the whole parameters into ``shard``."""
        whole, total = self.bytes(self.num_bytes), self.digest_values()
        if self.shard is None:
            self.shard = torch.zeros(self.chunk, dtype=torch.uint8, device=whole.device)
        first, last = self.part(rank)
        self.shard[: last - first] = whole[first:last]
        self.version, self.is_changed, self.seen = StorageVersion(total, 0), False, total

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's part; it exists once the whole has been freed."""
        assert self.shard is not None
        return self.shard
