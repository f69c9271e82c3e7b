"""``Hosts``: sums over ranks of several hosts, through shared memory within a host and between one rank of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagom.collectives.native import OPERATIONS, TYPES
from lagom.collectives.shared import shared_by_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.collectives.native import Communicator

_PIECE = 4 << 20
"""Bytes that are on their way between hosts while the next ones are summed within them."""
_SUM = OPERATIONS["sum"]


class Hosts:
    """The ranks of this host, and the first of each host. See Note [Several hosts].

    Args:
        near: of the ranks of this host; None where this is the only one.
        leaders: a process group of the first ranks of all hosts; None on others.
    """

    def __init__(self, near: Communicator | None, leaders: Any) -> None:
        self.near = near
        self.leaders = leaders

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous ``tensor`` over the ranks of all hosts, in place, to the same bits on all.

        Raises:
            RuntimeError: when a rank is gone, or ranks differ.
        """
        parts = tensor.view(-1).split(max(_PIECE // tensor.element_size(), 1)) if tensor.numel() else [tensor]
        try:
            works = []
            for part in parts:
                if self.near is not None:
                    self.near.all_reduce(part.data_ptr(), part.numel(), TYPES[part.dtype], _SUM)
                works.append(self.leaders.allreduce([part]) if self.leaders is not None else None)
            for part, work in zip(parts, works, strict=True):
                if work is not None:
                    work.wait()
                if self.near is not None:
                    self.near.broadcast(part.data_ptr(), part.nbytes, 0)
        except BaseException as error:
            # The others of this host wait for what will not come.
            if self.near is not None:
                self.near.abort(f"the exchange between hosts failed: {error}")
            raise

    def close(self) -> None:
        """Hang up."""
        if self.near is not None:
            self.near.close()


def hosts(
    rank: int,
    all_gather: Callable[[bytes], list[bytes]],
    among: Callable[[str, int, int], Any],
    timeout_s: float,
    number: int = 1,
) -> list[Hosts] | str:
    """``number`` of them, which all ranks call for; or why there are none, in words, on all ranks.

    Args:
        all_gather: an exchange of all ranks that works already.
        among: makes a process group of a name, for a rank of so many.
        timeout_s: how long an exchange will wait for a rank.

    Raises:
        OSError: when a rank is gone meanwhile.
        RuntimeError: when the hosts do not connect.
    """
    found = shared_by_host(rank, all_gather, timeout_s, number)
    if isinstance(found, str):
        return found
    homes, near = found
    if not 1 < len(homes) < sum(map(len, homes)):
        return "each rank is on a host of its own"
    first = next((i for i, home in enumerate(homes) if home[0] == rank), None)
    leaders = [among(f"hosts/{i}", first, len(homes)) if first is not None else None for i in range(number)]
    return [Hosts(near[i] if near else None, leaders[i]) for i in range(number)]


# Note [Several hosts]
#
# Between hosts each number travels once to and fro, however many ranks a host has: the ranks of a host sum theirs in
# the memory that they share, the first of them sums with those of other hosts over gloo, and the result is written
# back to the memory. Large tensors go in pieces, so that one is between hosts while the next is summed within. All
# ranks end with the same bits, since those of a host have what their first one has, and gloo gives all that it serves
# the same.
