"""``ParameterStore``: where the values of parameters are; by default whole, in the parameters themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ParameterStore:
    """Whole parameters; an extension that keeps their values elsewhere has a subclass."""

    keeps_shards = False
    """Whether this rank may keep only a shard of a parameter."""

    def is_sharded(self, parameter: Tensor) -> bool:
        """Return whether this rank keeps only a shard of the parameter."""
        return False

    def num_bytes(self) -> int:
        """Return the bytes of values that this rank keeps elsewhere than in the parameters."""
        return 0
