"""``Transports``: the transports for CPU tensors between ranks, found in the first exchange."""

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
"""Groups that are never destroyed: gloo's threads may still hold their tensors, and destroying then can deadlock."""

log = logging.getLogger("lagom")


class Transports:
    """Shared memory of the ranks of a host, and exchanges between hosts. See Note [Shared memory].

    Args:
        all_gather: an exchange that works already.
        among: makes a process group for CPU tensors, of one rank per host, from a name, a rank and a world size.
        timeout_s: how long a rank waits for another.
        key: secret of the run's ranks.
        shares_memory: whether ranks may share memory.
        tells: whether to log why there is no shared memory.
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
        """Communicator of this host; False if not all ranks are on this host, None before that is known."""
        self.near_aside: Communicator | None = None
        """Communicator for exchanges in an independent order."""
        self.hosts: HostExchanges | None = None
        """Exchanges between hosts, if there are several and some have several ranks."""
        self.hosts_aside: HostExchanges | None = None

    def connected(self) -> Communicator | Literal[False]:
        """Return the communicator of this host if all ranks are on it, else False; the first call is a collective."""
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
        """Set ``hosts`` if possible; return the reason why not all ranks share memory."""
        found = hosts(self._rank, self._all_gather, self._among, self._timeout_s, 2, self._key)
        if isinstance(found, str):
            return found
        self.hosts, self.hosts_aside = found
        KEPT.extend(one.leaders for one in found if one.leaders is not None)
        return SEVERAL_HOSTS

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self.near:
            self.near.close()
        if self.near_aside is not None:
            self.near_aside.close()
        for one in (self.hosts, self.hosts_aside):
            if one is not None:
                one.close()


# Note [Shared memory]
#
# When all ranks are processes of one host, CPU tensors go through memory that they share; see csrc/communicator.hpp.
# The first exchange finds out, on all ranks together, whether this is possible: one rank without the compiled part
# means none for all. When ranks are on several hosts, only sums use shared memory, and then travel between hosts; see
# Note [Several hosts]. Exchanges in an independent order have their own memory and a thread.
