"""``ParameterStorage``: the memory of one sharded parameter, with this rank's part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lagom.gradients.checksum import hash_values
from lagom.run_state.memory_layout import is_dense, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable

_ALIGNED = 64
"""Alignment of the parts, in bytes."""


class StorageVersion(NamedTuple):
    """Version of a parameter's values: if it is equal on two ranks, their parts were cut from equal values."""

    total: int
    """Digest of all bits of the whole parameter after its last change outside of an optimizer's step."""
    num_steps: int
    """Number of optimizer steps since that change."""


class ParameterStorage:
    """Keeps this rank's part of one parameter's memory, which is cut into ``chunk`` bytes for each rank.

    Args:
        key: name of this storage (a "unit"), equal on all ranks.
    """

    def __init__(self, key: bytes, tensor: torch.Tensor, world_size: int) -> None:
        storage = storage_of(tensor)
        self.key = key
        self.num_bytes = storage.nbytes()
        self.chunk = -(-self.num_bytes // (world_size * _ALIGNED)) * _ALIGNED
        self.room = self.chunk * world_size
        """Bytes of the chunks of all ranks: ``num_bytes``, rounded up."""
        self.place = storage._cdata
        self.shard: torch.Tensor | None = None
        """This rank's part in bytes; None until it is cut from the whole parameter for the first time."""
        self.is_whole = True
        self.is_changed = True
        """Whether the whole parameter has been written since the parts were cut from it."""
        self.version = StorageVersion(0, 0)
        self.seen = 0
        """Digest of all bits at the last check, while ``is_held``."""
        self.is_held = False
        """Whether the memory must stay in place, since the program has its address (``data_ptr``, ``numpy``)."""
        self.is_shown = False
        """Whether the memory must stay in place for good, also after the next step (DLPack)."""
        self._ref = StorageWeakRef(storage)
        self._reference: tuple[StorageVersion, Any] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a tensor still uses this storage."""
        return not self._ref.expired()

    def storage(self) -> torch.UntypedStorage:
        """Return the storage, which must be alive; this object itself keeps only a weak reference."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        assert found is not None
        return found

    def part(self, rank: int) -> tuple[int, int]:
        """Return the start and end of ``rank``'s part, in bytes."""
        return min(rank * self.chunk, self.num_bytes), min((rank + 1) * self.chunk, self.num_bytes)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has all elements of the storage, and is no view of a part of it."""
        return tensor.storage_offset() == 0 and tensor.nbytes == self.num_bytes and is_dense(tensor)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Return the first ``num_bytes`` bytes of the storage, as a tensor of uint8 that shares its memory."""
        storage = self.storage()
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (num_bytes,), (1,))

    def digest_values(self) -> int:
        """Return a digest of all bits that depends on their positions; a sum would not notice swapped rows."""
        return int.from_bytes(hash_values(self.bytes(self.num_bytes)), "little")

    def update_part(self, rank: int) -> None:
        """Copy this rank's part of the whole parameter into ``shard``, and renew the version."""
        whole, total = self.bytes(self.num_bytes), self.digest_values()
        if self.shard is None:
            self.shard = torch.zeros(self.chunk, dtype=torch.uint8, device=whole.device)
        first, last = self.part(rank)
        self.shard[: last - first] = whole[first:last]
        self.version, self.is_changed, self.seen = StorageVersion(total, 0), False, total

    def restore_part(self, raw: torch.Tensor, version: StorageVersion) -> None:
        """Set this rank's part to the bytes ``raw`` of a whole parameter with ``version``."""
        self.shard = torch.zeros(self.chunk, dtype=torch.uint8, device=self.storage().device)
        self.shard[: len(raw)] = raw
        self.version, self.is_changed = version, False

    def reference(self, make: Callable[[], Any]) -> Any:
        """Return the object that stands for this version of the unit in a pickle; ``make`` it if there is none yet."""
        if self._reference is None or self._reference[0] != self.version:
            self._reference = self.version, make()
        return self._reference[1]

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's part, after it has been cut from the whole parameter."""
        assert self.shard is not None
        return self.shard
