"""``shuffle_order``: ``shuffle=True`` over very many samples, whose order is never written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from lagom.collectives.native import native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.session.session import Session

MANY = 100_000_000
"""Samples from which the order is made on the fly. Torch's own takes 5 GB and 10 seconds there, on every rank."""
_BLOCKS = (1 << 12, 1 << 16)
"""Places that are evaluated at once: the first time, so that an epoch begins at once, and then."""
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1


def shuffle_order(session: Session) -> Any:
    """``RandomSampler.__iter__`` that takes no memory from ``MANY`` samples on; below, and alone, it is torch's."""
    original = vars(RandomSampler)["__iter__"]

    def iterate(self: RandomSampler) -> Iterator[int]:
        if not session.distributed or self.replacement or len(self.data_source) < MANY:
            found: Iterator[int] = original(self)
            return found
        return _orders(self)

    return iterate


def _orders(sampler: RandomSampler) -> Iterator[int]:
    """As torch's sampler: one order after the other until there are as many as were asked for."""
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    n, left = len(sampler.data_source), sampler.num_samples
    while left:
        key = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        start = 0
        while start < min(n, left):
            count = min(_BLOCKS[start > 0], n - start, left - start)
            yield from permute(n, key, start, count).tolist()
            start += count
        left -= start


def permute(n: int, key: int, start: int, count: int) -> torch.Tensor:
    """What stands at places ``start`` to ``start + count`` in the order of [0, n) that ``key`` chooses; int64.

    See Note [Order on the fly]. 25 ns each, or some microseconds without the compiled part.
    """
    if not 0 <= start <= start + count <= n <= 1 << 62:
        raise ValueError(f"there are no places {start} to {start + count} in an order of {n}")
    if native() is None:
        return permute_by_torch(n, key, start, count)
    found = torch.empty(count, dtype=torch.int64, device="cpu")
    native().permute(n, key & _ALL, start, found.data_ptr(), count)
    return found


def permute_by_torch(n: int, key: int, start: int, count: int) -> torch.Tensor:
    """The same without the compiled part."""
    bits = max((n - 1).bit_length(), 1)
    low = bits // 2
    low_mask, high_mask = (1 << low) - 1, (1 << (bits - low)) - 1
    keys = [_signed(_mixed_number(key + (i + 1) * _GOLDEN & _ALL)) for i in range(_ROUNDS)]
    found = torch.arange(start, start + count, dtype=torch.int64, device="cpu")
    walking = torch.arange(count, dtype=torch.int64, device="cpu")
    while len(walking):
        place = found[walking]
        right, left = place & low_mask, place >> low
        for i in range(0, _ROUNDS, 2):
            left ^= _mixed(right + keys[i]) & high_mask
            right ^= _mixed(left + keys[i + 1]) & low_mask
        place = left << low | right
        found[walking] = place
        walking = walking[place >= n]
    return found


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014), in wrapping int64."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filling up with zeros: ``>>`` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed_number(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


# Note [Order on the fly]
#
# A Feistel network permutes the numbers of b bits, b being the least with 2^b >= n: it parts a number in two, and eight
# times changes one part by a mixture of the other with a key of the round, which can be undone, and so never gives two
# numbers the same result. What comes out as n or more goes through it again until it does not ("cycle walking"; Black
# and Rogaway, Ciphers with arbitrary finite domains, 2002), less than twice on average. That is a permutation of [0, n)
# whose value at any place is computed from the place alone: no memory, and no time to begin.
#
# Of the n! orders it can give 2^64, as torch.randperm can by its seed.
