"""``rounds``: the senders and receivers of a host in each round of messages. See Note [Rounds] in host_messages.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf

_RADIX = 8
_UNEQUAL = 1.5  # factor for blocks of unequal size: a host of a smaller block may send to two hosts of a larger one


@dataclass(frozen=True)
class Round:
    """One round of a host, in which blocks of hosts send each other the messages of all their hosts."""

    blocks: tuple[range, ...]
    """Up to 8 blocks of hosts, in order; their sizes differ by one at most."""
    own: int
    """Index of this host's block in ``blocks``."""
    place: int
    """Index of this host in its block."""

    @property
    def senders(self) -> list[int]:
        """Return the host of each other block, in order, that sends to this host."""
        others = [block for i, block in enumerate(self.blocks) if i != self.own]
        return [block[self.place % len(block)] for block in others]

    @property
    def receivers(self) -> list[int]:
        """Return the hosts of other blocks to which this host sends."""
        size = len(self.blocks[self.own])
        others = [block for i, block in enumerate(self.blocks) if i != self.own]
        return [host for block in others for host in block[self.place :: size]]


def rounds(num_hosts: int, host: int) -> list[Round]:
    """Return the rounds of ``host`` in order; there are as few as blocks of 8 allow."""
    left = 0
    while _RADIX**left < num_hosts:
        left += 1
    pairs = []
    block = range(num_hosts)
    while len(block) > 1:
        blocks = _split(block, _best_cut(len(block), left)[1])
        own = next(i for i, one in enumerate(blocks) if host in one)
        block, left = blocks[own], left - 1
        pairs.append(Round(blocks, own, block.index(host)))
    return pairs[::-1]


@cache
def _best_cut(num_hosts: int, num_rounds: int) -> tuple[float, int]:
    """Return an estimate of a host's fewest messages in ``num_rounds``, and the number of blocks that takes so few."""
    if num_hosts == 1:
        return 0.0, 1
    best = inf, 1
    for num in range(2, min(_RADIX, num_hosts) + 1) if num_rounds else ():
        messages = (num - 1) * (1.0 if num_hosts % num == 0 else _UNEQUAL)
        best = min(best, (messages + _best_cut(-(-num_hosts // num), num_rounds - 1)[0], num))
    return best


def _split(block: range, num: int) -> tuple[range, ...]:
    """Return ``block`` cut into ``num`` blocks whose sizes differ by one at most."""
    ends = [block.start + len(block) * i // num for i in range(num + 1)]
    return tuple(range(start, end) for start, end in pairwise(ends))
