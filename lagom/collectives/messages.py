"""Messages as tensors, for process groups that know nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


def gathered(process_group: dist.ProcessGroup, rank: int, world_size: int, data: bytes) -> list[bytes]:
    """The ``data`` of all ranks, in rank order, before there is any better way; lengths may differ."""
    lengths = torch.zeros(world_size, dtype=torch.int64)
    lengths[rank] = len(data)
    process_group.allreduce([lengths]).wait()
    mine = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    mine[: len(data)] = as_tensor(data)
    parts = [torch.empty_like(mine) for _ in range(world_size)]
    process_group.allgather([parts], [mine]).wait()
    return [as_bytes(part[:length]) for part, length in zip(parts, lengths.tolist(), strict=True)]


def as_tensor(data: bytes) -> torch.Tensor:
    """``data`` as numbers, a copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """What is in a ``tensor`` of bytes on the CPU."""
    return bytes(tensor.numpy().data)
