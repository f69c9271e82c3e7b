"""Conversions between bytes and tensors, for process groups that send only tensors."""

from __future__ import annotations

import torch


def as_tensor(data: bytes) -> torch.Tensor:
    """Return a copy of ``data`` as a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the content of a CPU ``tensor`` of uint8."""
    return bytes(tensor.numpy().data)
