"""Messages as tensors, for process groups that know nothing else."""

from __future__ import annotations

import torch


def as_tensor(data: bytes) -> torch.Tensor:
    """``data`` as numbers, a copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """What is in a ``tensor`` of bytes on the CPU."""
    return bytes(tensor.numpy().data)
