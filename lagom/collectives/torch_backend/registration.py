"""Registers the process-group backend "lagom", for DDP, FSDP2 and ``dist`` calls as they are."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lagom.collectives.run_store import SealedStore, all_gather_by
from lagom.collectives.torch_backend.gloo_fallback import LateGloo
from lagom.collectives.torch_backend.shared_group import BACKEND, SharedProcessGroup
from lagom.collectives.transports import connect_memory

if TYPE_CHECKING:
    from datetime import timedelta

log = logging.getLogger("lagom")
_key, _ip = b"", ""


def register(key: bytes = b"", ip: str = "") -> None:
    """Register ``dist.init_process_group("lagom")`` and ``new_group(backend="lagom")`` with torch in this process.

    Args:
        key: secret of the run's ranks, if they have one.
        ip: address at which other hosts reach this one; by default the one from which it reaches MASTER_ADDR.
    """
    global _key, _ip  # torch keeps one backend per name
    _key, _ip = key, ip
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, devices=["cpu"])


def _created(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    def gloo() -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

    def gloo_here() -> Any:
        gloo_class: Any = dist.ProcessGroupGloo  # torch's own types lack its options
        options = gloo_class._Options()
        options._devices = [gloo_class.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return gloo_class(dist.PrefixStore("gloo", store), rank, size, options)

    gather = all_gather_by(SealedStore(store, _key), "ways", rank, size, timeout.total_seconds())
    found = connect_memory(rank, gather, _ip or _own_address(), timeout.total_seconds(), key=_key)
    if isinstance(found, str):
        if rank == 0:
            log.info("the backend %r is gloo here: %s", BACKEND, found)
        return gloo()
    on_one_host = found[0].memory is not None
    return SharedProcessGroup(LateGloo(gloo_here) if on_one_host else gloo(), found[0], rank, size, timeout)


def _own_address() -> str:
    """Return the address from which this host reaches the one where torch's ranks meet."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # sends nothing
        return str(probe.getsockname()[0])
