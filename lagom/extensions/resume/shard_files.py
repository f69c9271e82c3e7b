"""``ShardFiles``: the shards of all ranks in a snapshot, from which each rank that continues reads what it needs."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lagom.errors import SnapshotError
from lagom.program.payload import Parcel, parts_of, unpack

if TYPE_CHECKING:
    from lagom.run_state.state_shards import ShardParts

_address = torch._C.TensorBase.data_ptr
"""Returns a tensor's address; with ``zero_lvl=3``, ``Tensor.data_ptr`` looks for parameters first."""


def shard_parcel(shards: ShardParts) -> Parcel:
    """Return a rank's shards as a parcel: a head, with values and the place of each range, and the ranges' bytes."""
    index: dict[Any, list[tuple[int, int]]] = {}
    buffers: list[memoryview] = []
    for key, ranges in shards.ranges.items():
        index[key] = [(first, last) for first, last, _ in ranges]
        buffers += [_memory(raw) for _, _, raw in ranges]
    return Parcel.of_parts(Parcel((shards.values, index)).tobytes(), buffers)


def on_cpu(shards: ShardParts) -> ShardParts:
    """Return ``shards`` with copies, on the CPU, of ranges that are on an accelerator."""
    ranges = {key: [(first, last, raw.cpu()) for first, last, raw in found] for key, found in shards.ranges.items()}
    return shards._replace(ranges=ranges)


def _memory(raw: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of uint8 on the CPU, which keep the tensor alive."""
    if not len(raw):
        return memoryview(b"")
    array: Any = (ctypes.c_char * len(raw)).from_address(_address(raw))
    array._owner = raw
    return memoryview(array).cast("B")


class ShardFiles:
    """Shards in mapped files, one file for each rank that has written the snapshot.

    Args:
        fds: descriptors of the files, in rank order; this object closes them.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._values: dict[Any, Any] = {}
        self._ranges: dict[Any, list[tuple[int, int, memoryview]]] = {}
        for fd in fds:
            with open(fd, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            head, *buffers = parts_of(memoryview(mapped))
            values, index = unpack(bytes(head))
            self._values = values | self._values
            rest = iter(buffers)
            for key, ranges in index.items():
                self._ranges.setdefault(key, []).extend((first, last, next(rest)) for first, last in ranges)

    def value(self, key: Any) -> Any:
        """See ``KeptParts``."""
        return self._values.get(key)

    def read(self, key: Any, first: int, last: int) -> torch.Tensor:
        """See ``KeptParts``.

        Raises:
            SnapshotError: if no rank has written some of these bytes.
        """
        buffer = torch.empty(last - first, dtype=torch.uint8)
        reached = first
        for begin, end, raw in self._overlapping(key, first, last):
            if begin > reached:
                break
            piece = raw[reached - begin : min(end, last) - begin]
            if len(piece):
                buffer[reached - first :][: len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
            reached = max(reached, min(end, last))
        if reached < last:
            raise SnapshotError(f"no rank has kept bytes {reached} to {last} of {key}; begin a new run")
        return buffer

    def _overlapping(self, key: Any, first: int, last: int) -> Iterator[tuple[int, int, memoryview]]:
        ranges = self._ranges.get(key, [])
        return ((begin, end, raw) for begin, end, raw in sorted(ranges, key=_order) if end > first and begin < last)


def _order(one: tuple[int, int, memoryview]) -> tuple[int, int]:
    return one[:2]
