"""The process-group backend "lagom", which DDP, FSDP2 and ``dist`` calls use as they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lagom.collectives.hosts import hosts
from lagom.collectives.moves import Moves
from lagom.collectives.shared import SEVERAL_HOSTS, shared
from lagom.collectives.shared_group import BACKEND, SharedProcessGroup
from lagom.collectives.spread_group import SpreadProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

log = logging.getLogger("lagom")


def register() -> None:
    """Make ``dist.init_process_group("lagom")`` and ``new_group(backend="lagom")`` known to torch in this process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, devices=["cpu"])


def _created(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    gather = _gather_by(store, rank, size)
    found: Any = shared(rank, gather, timeout.total_seconds())
    if found == SEVERAL_HOSTS:

        def among(name: str, place: int, count: int) -> Any:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), place, count, timeout)

        found = hosts(rank, gather, among, timeout.total_seconds())
        if not isinstance(found, str):
            return SpreadProcessGroup(gloo, found[0], rank, size, timeout)
    if isinstance(found, str):
        if rank == 0:
            log.info("the backend %r is gloo here: %s", BACKEND, found)
        return gloo
    return SharedProcessGroup(gloo, Moves(found[0], rank, size), rank, size, timeout)


def _gather_by(store: dist.Store, rank: int, size: int) -> Callable[[bytes], list[bytes]]:
    num = 0

    def all_gather(data: bytes) -> list[bytes]:
        nonlocal num
        num += 1
        store.set(f"lagom/{num}/{rank}", "x" + data.decode())
        return [bytes(store.get(f"lagom/{num}/{peer}"))[1:] for peer in range(size)]

    return all_gather
