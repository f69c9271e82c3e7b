"""Registers the process-group backend "lagom", for DDP, FSDP2 and ``dist`` calls as they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lagom.collectives.hosts import hosts
from lagom.collectives.run_store import SealedStore, all_gather_by
from lagom.collectives.shared_memory import SEVERAL_HOSTS, shared
from lagom.collectives.tensor_ops import TensorCollectives
from lagom.collectives.torch_backend.shared_group import BACKEND, SharedProcessGroup
from lagom.collectives.torch_backend.spread_group import SpreadProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

log = logging.getLogger("lagom")
_key = b""


def register(key: bytes = b"") -> None:
    """Register ``dist.init_process_group("lagom")`` and ``new_group(backend="lagom")`` with torch in this process.

    Args:
        key: secret of the run's ranks, if they have one.
    """
    global _key  # torch keeps one backend per name
    _key = key
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, devices=["cpu"])


def _created(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    def gloo(name: str, place: int = rank, count: int = size) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), place, count, timeout)

    def gloo_here() -> Any:
        gloo_class: Any = dist.ProcessGroupGloo  # torch's own types lack its options
        options = gloo_class._Options()
        options._devices = [gloo_class.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return gloo_class(dist.PrefixStore("gloo", store), rank, size, options)

    gather = all_gather_by(SealedStore(store, _key), "ways", rank, size, timeout.total_seconds())
    found: Any = shared(rank, gather, timeout.total_seconds(), key=_key)
    if not isinstance(found, str):
        late: Any = _LateGloo(gloo_here)
        return SharedProcessGroup(late, TensorCollectives(found[0], rank, size), rank, size, timeout)
    if found == SEVERAL_HOSTS:
        found = hosts(rank, gather, gloo, timeout.total_seconds(), key=_key)
        if not isinstance(found, str):
            return SpreadProcessGroup(gloo("gloo"), found[0], rank, size, timeout)
    if rank == 0:
        log.info("the backend %r is gloo here: %s", BACKEND, found)
    return gloo("gloo")


class _LateGloo:
    """A gloo process group that is made when all ranks call one of its collectives; see Note [Gloo] in group.py.

    Args:
        make: makes it, on all ranks.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name in ("send", "recv", "recv_anysource"):  # two ranks alone cannot make a group of all
                raise RuntimeError(f"{name} of a tensor that is sparse, quantized or not on the CPU; send a dense one")
            if self._made is None:
                self._made = self._make()
            return getattr(self._made, name)(*args)

        return call
