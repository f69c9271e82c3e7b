"""``StateShards``: how a snapshot holds state of which each rank has a shard; extensions that shard have a subclass."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch


class ShardParts(NamedTuple):
    """This rank's shards of the program's state, for a snapshot. Objects on all ranks have equal keys."""

    values: dict[Any, Any]
    """Values by key, such as the type of a tensor's elements."""
    ranges: dict[Any, list[tuple[int, int, torch.Tensor]]]
    """Ranges of the bytes of a whole object, by its key: first byte, byte after the last, and these bytes."""
    version: str
    """Text that is equal on two ranks if their shards belong to the same state."""


class KeptParts(Protocol):
    """The shards that all ranks have written for a snapshot."""

    def value(self, key: Any) -> Any:
        """Return the value that any rank has written for ``key``; None if none has."""

    def read(self, key: Any, first: int, last: int) -> torch.Tensor:
        """Return bytes ``first`` to ``last`` of the whole object of ``key``, as a new tensor of uint8 on the CPU."""


class StateShards(Protocol):
    """Shards of the program's state, which an extension keeps on each rank: how a snapshot holds them."""

    is_sharding: bool
    """Whether ranks have shards in this run; with one rank, state that was sharded before is put back whole."""

    def collect(self) -> ShardParts:
        """Return this rank's shards; also called in a fork of the rank."""

    def reduce(self, value: Any) -> Any:
        """Return how to pickle an object whose values are in shards, as ``__reduce_ex__`` does, or NotImplemented."""

    def gradient(self, leaf: torch.Tensor) -> Any:
        """Return an object that unpickles as the gradient of ``leaf``; None if this gradient is not sharded."""

    def end_restore(self) -> None:
        """Complete the objects that were unpickled, when all have been."""
