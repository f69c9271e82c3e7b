"""``Transports``: those by which CPU tensors go from rank to rank, as the first exchange finds them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from lagom.collectives.hosts import hosts
from lagom.collectives.shared_memory import SEVERAL_HOSTS, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from lagom.collectives.hosts import HostExchanges
    from lagom.collectives.native import Communicator

KEPT: list[dist.ProcessGroup] = []
"""Groups that threads of gloo may still hold tensors of: to destroy one then can deadlock, so a rank never does."""

log = logging.getLogger("lagom")


class Transports:
    """Memory that ranks share, and what joins hosts. See Note [Shared memory].

    Args:
        all_gather: an exchange that works already.
        among: makes a process group of a name for CPU tensors, for a rank of so many, which are one of each host.
        timeout_s: how long a rank waits for another.
        key: what ranks know and nobody else does.
        shares_memory: whether there may be any.
        tells: whether to say where there are none.
    """

    def __init__(
        self,
        rank: int,
        all_gather: Callable[[bytes], list[bytes]],
        among: Callable[[str, int, int], dist.ProcessGroup],
        timeout_s: float,
        *,
        key: bytes,
        shares_memory: bool,
        tells: bool,
    ) -> None:
        self._rank = rank
        self._all_gather = all_gather
        self._among = among
        self._timeout_s = timeout_s
        self._key = key
        self._shares_memory = shares_memory
        self._tells = tells
        self.near: Communicator | Literal[False] | None = None
        """Of this host; False where not all ranks are there, None before that is known."""
        self.near_aside: Communicator | None = None
        """For exchanges in an order of their own."""
        self.hosts: HostExchanges | None = None
        """Where there are several, some with several ranks."""
        self.hosts_aside: HostExchanges | None = None

    def connected(self) -> Communicator | Literal[False]:
        """The communicator of this host, if all ranks are there; the first call is a collective."""
        if self.near is None:
            self.near = False
            if self._shares_memory:
                found = shared(self._rank, self._all_gather, self._timeout_s, 2, key=self._key)
                if found == SEVERAL_HOSTS:
                    found = self._spread()
                if not isinstance(found, str):
                    self.near, self.near_aside = found
                elif self.hosts is None and self._rank == 0 and self._tells:
                    log.info("CPU tensors are not exchanged through shared memory: %s", found)
        return self.near

    def _spread(self) -> str:
        """Find ``hosts``; a word on what ranks share."""
        found = hosts(self._rank, self._all_gather, self._among, self._timeout_s, 2, self._key)
        if isinstance(found, str):
            return found
        self.hosts, self.hosts_aside = found
        KEPT.extend(one.leaders for one in found if one.leaders is not None)
        return SEVERAL_HOSTS

    def close(self) -> None:
        """Hang up on the other ranks."""
        if self.near:
            self.near.close()
        if self.near_aside is not None:
            self.near_aside.close()
        for one in (self.hosts, self.hosts_aside):
            if one is not None:
                one.close()


# Note [Shared memory]
#
# Where all ranks are processes of one host, what is on the CPU goes through memory that they share; see
# csrc/communicator.hpp. Whether that is so is found out by the first exchange, on all ranks together:
# a rank without the compiled part means none for all. Where ranks are on several hosts, only sums go through what
# memory they share, and then between hosts; see Note [Several hosts]. Exchanges in an order of their own have memory of
# their own, and a thread.
