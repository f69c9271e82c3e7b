"""``make_sampler_iter``: ``shuffle=True`` over very many samples, without storing the order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

from lagom.collectives.native import native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.session.session import Session

MANY = 100_000_000
"""Number of samples from which the order is computed on the fly: torch's own takes 5 GB and 10 s on every rank."""
_BLOCKS = (1 << 12, 1 << 16)
"""Number of places computed in one call: few in the first block, so that an epoch begins without delay, then more."""
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1


def make_sampler_iter(session: Session) -> Any:
    """Return a ``RandomSampler.__iter__`` that stores no order from ``MANY`` samples on.

    With fewer samples, with replacement and in a run of one rank, it calls torch's.
    """
    original = vars(RandomSampler)["__iter__"]

    def iterate(self: RandomSampler) -> Iterator[int]:
        if not session.distributed or self.replacement or len(self.data_source) < MANY:
            found: Iterator[int] = original(self)
            return found
        return _yield_orders(self)

    return iterate


def _yield_orders(sampler: RandomSampler) -> Iterator[int]:
    """Yield ``num_samples`` indices from successive permutations, each with its own key, as torch's sampler does."""
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
    """Return values ``start`` to ``start + count`` of the permutation of [0, n) that ``key`` selects, as int64.

    See Note [Order on the fly]. A value takes 25 ns, or some microseconds without the compiled extension.

    Raises:
        ValueError: if the permutation has fewer values, or ``n`` is above 2^62.
    """
    if not 0 <= start <= start + count <= n <= 1 << 62:
        raise ValueError(f"there are no places {start} to {start + count} in an order of {n}")
    if native() is None:
        return permute_with_torch(n, key, start, count)
    found = torch.empty(count, dtype=torch.int64, device="cpu")
    native().permute(n, key & _ALL, start, found.data_ptr(), count)
    return found


def permute_with_torch(n: int, key: int, start: int, count: int) -> torch.Tensor:
    """Compute ``permute`` without the compiled extension."""
    bits = max((n - 1).bit_length(), 1)
    low = bits // 2
    low_mask, high_mask = (1 << low) - 1, (1 << (bits - low)) - 1
    keys = [_to_signed(_mix_number(key + (i + 1) * _GOLDEN & _ALL)) for i in range(_ROUNDS)]
    found = torch.arange(start, start + count, dtype=torch.int64, device="cpu")
    walking = torch.arange(count, dtype=torch.int64, device="cpu")
    while len(walking):
        place = found[walking]
        right, left = place & low_mask, place >> low
        for i in range(0, _ROUNDS, 2):
            left ^= _mix(right + keys[i]) & high_mask
            right ^= _mix(left + keys[i + 1]) & low_mask
        place = left << low | right
        found[walking] = place
        walking = walking[place >= n]
    return found


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014) in wrapping int64."""
    x = (x ^ _shift_right(x, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; ``>>`` of int64 would fill with the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_number(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
    return x ^ x >> 31


def _to_signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


# Note [Order on the fly]
#
# A Feistel network permutes the numbers of b bits, where b is the least with 2^b >= n. It splits a number in two
# halves; eight times, it changes one half by a hash of the other half and a round key. Each round can be undone, so two
# numbers never give the same result. A result of n or more goes through the network again until it is below n ("cycle
# walking"; Black and Rogaway, Ciphers with arbitrary finite domains, 2002), less than twice on average. The result is a
# permutation of [0, n) whose value at a place is computed from the place alone: it needs no memory, and no time to
# begin.
#
# The key, a random int64 from 0 on, selects one of 2^63 of the n! orders. torch's RandomSampler seeds randperm with
# such a number too, unless the program gives the sampler a generator.
