"""``Frame``: an exchange of one size, whatever it carries, in which ranks notice when they mean different things."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lagom.collectives.group import Group

HEAD = 8
"""Elements of the frame that hold the signature."""
FRAME = 16384
"""Elements of the frame that hold numbers. Over gloo, 8 bytes and 128 KB take the same time."""


class Frame:
    """A buffer of the same size on all ranks, with a signature of its contents in front.

    Exchanges of different sizes would abort the process (gloo) or mix up numbers. See Note [Which gradients].
    """

    def __init__(self, group: Group, size: int = FRAME) -> None:
        self.buffer = torch.zeros(HEAD + size, dtype=torch.float64)
        self.body = self.buffer[HEAD:]
        self._head = self.buffer[:HEAD]
        self._group = group

    def exchange(self, signed: torch.Tensor) -> bool:
        """Sum the body over the ranks; whether all gave the same signature. Otherwise the body is lost, and zero."""
        self._head.copy_(signed)
        self._group.all_reduce(self.buffer)
        if agreed(self._head.tolist(), self._group.world_size):
            return True
        self.buffer.zero_()
        return False

    def sum(self, numbers: torch.Tensor, signed: torch.Tensor) -> bool:
        """Sum ``numbers``, contiguous float64 on the CPU, over the ranks, in place, if all gave the same signature."""
        flat = numbers.view(-1)
        used = self.body[: len(flat)] if len(flat) <= len(self.body) else None
        if used is not None:
            used.copy_(flat)
        if not self.exchange(signed):
            return False
        if used is None:
            self._group.all_reduce(flat)
        else:
            flat.copy_(used)
            used.zero_()  # what is left would grow from sum to sum
        return True


def signature(identity: bytes) -> torch.Tensor:
    """``HEAD`` float64: four 16-bit pieces of a hash, and their squares.

    Summed over N ranks they tell whether all had the same: N * sum(h^2) == (sum h)^2 holds only then
    (Cauchy-Schwarz), and float64 is exact at this size.
    """
    digest = hashlib.blake2b(identity, digest_size=8).digest()
    pieces = [float(int.from_bytes(digest[i : i + 2], "little")) for i in range(0, 8, 2)]
    return torch.tensor(pieces + [piece * piece for piece in pieces], dtype=torch.float64)


def agreed(head: list[float], world_size: int) -> bool:
    """Whether all ranks gave the same signature, from its sum."""
    half = HEAD // 2
    return all(world_size * head[half + i] == head[i] * head[i] for i in range(half))
