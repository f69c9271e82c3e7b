"""``rounds``: between which hosts messages travel, round by round. See Note [Rounds] in host_messages.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

_RADIX = 8


@dataclass(frozen=True)
class Round:
    """A round of one host: blocks of hosts tell each other what their own hosts have said."""

    blocks: tuple[range, ...]
    """Up to 8 blocks of hosts, in order; their sizes differ by one at most."""
    own: int
    """Place in ``blocks`` of this host's block."""
    place: int
    """Place of this host in its block."""

    @property
    def senders(self) -> list[int]:
        """Return the host from which this one hears, of each other block, in order."""
        others = [block for i, block in enumerate(self.blocks) if i != self.own]
        return [block[self.place % len(block)] for block in others]

    @property
    def receivers(self) -> list[int]:
        """Return the hosts that hear from this one."""
        size = len(self.blocks[self.own])
        others = [block for i, block in enumerate(self.blocks) if i != self.own]
        return [host for block in others for host in block[self.place :: size]]


def rounds(num_hosts: int, host: int) -> list[Round]:
    """Return the rounds of ``host``, in which it takes part one after the other."""
    found = []
    block, width = range(num_hosts), 1
    while width < num_hosts:
        width *= _RADIX
    while width > 1:
        width //= _RADIX
        blocks = _split(block, -(-len(block) // width))
        own = next(i for i, one in enumerate(blocks) if host in one)
        block = blocks[own]
        if len(blocks) > 1:
            found.append(Round(blocks, own, block.index(host)))
    return found[::-1]


def _split(block: range, num: int) -> tuple[range, ...]:
    """Return ``num`` blocks of as many hosts each, or one more."""
    ends = [block.start + len(block) * i // num for i in range(num + 1)]
    return tuple(range(start, end) for start, end in pairwise(ends))
