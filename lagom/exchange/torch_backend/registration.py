"""Registers the process-group backend "lagom", with which unchanged DDP, FSDP2 and ``dist`` calls work."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lagom.exchange.run_store import SealedStore, all_gather_by
from lagom.exchange.sockets.encryption import NO_CREDENTIALS, Credentials
from lagom.exchange.torch_backend.gloo_fallback import LateGloo
from lagom.exchange.torch_backend.shared_group import BACKEND, SharedProcessGroup
from lagom.exchange.torch_transport import refuse_gloo
from lagom.exchange.transports import connect_memory

if TYPE_CHECKING:
    from datetime import timedelta

log = logging.getLogger("lagom")
_credentials, _ip = NO_CREDENTIALS, ""


def register(credentials: Credentials = NO_CREDENTIALS, ip: str = "") -> None:
    """Register ``dist.init_process_group("lagom")`` and ``new_group(backend="lagom")`` with torch in this process.

    Args:
        credentials: key and certificates that the run's ranks share.
        ip: address at which other hosts reach this one; "" for the address from which this host reaches MASTER_ADDR.
    """
    global _credentials, _ip  # torch keeps one backend per name
    _credentials, _ip = credentials, ip
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, devices=["cpu"])
        # From torch 2.15 on, the flight recorder raises for process groups written in Python, unless this set has them.
        recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(BACKEND)


def _created(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    def gloo() -> Any:
        if _credentials.encrypt:
            refuse_gloo()
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

    def gloo_here() -> Any:
        gloo_class: Any = dist.ProcessGroupGloo  # torch's type stubs lack ``_Options``
        options = gloo_class._Options()
        options._devices = [gloo_class.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return gloo_class(dist.PrefixStore("gloo", store), rank, size, options)

    gather = all_gather_by(SealedStore(store, _credentials.key), "ways", rank, size, timeout.total_seconds())
    found = connect_memory(rank, gather, _ip or _own_address(), timeout.total_seconds(), credentials=_credentials)
    if isinstance(found, str):
        if rank == 0:
            log.info("the backend %r is gloo here: %s", BACKEND, found)
        return gloo()
    on_one_host = found[0].memory is not None
    other = LateGloo(gloo_here) if on_one_host else LateGloo(refuse_gloo) if _credentials.encrypt else gloo()
    return SharedProcessGroup(other, found[0], rank, size, timeout)


def _own_address() -> str:
    """Return the address from which this host reaches MASTER_ADDR, the host of the rendezvous; IPv4 if there is one."""
    found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 1, type=socket.SOCK_DGRAM)
    family, kind, _, _, master = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, kind) as probe:
        probe.connect(master)  # for UDP this sends nothing, and chooses the local address
        return str(probe.getsockname()[0])
