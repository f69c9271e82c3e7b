"""The private process group of a run's ranks, which the user's program does not see."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lagom.accelerators import is_accelerator
from lagom.config import TorchDistributedConfig
from lagom.errors import CollectiveError
from lagom.exchange.group import TIMEOUT_S, Group
from lagom.exchange.run_store import SealedStore, all_gather_by
from lagom.exchange.sockets.encryption import Credentials
from lagom.exchange.torch_transport import refuse_gloo
from lagom.extensions.registry import EXTENSIONS
from lagom.wire.spec import RankSpec

DEBUGGED_S = 10 * 24 * 3600.0
"""Seconds that a rank waits for another while a person debugs a rank; ``poll`` accepts at most 24 days."""


@contextmanager
def process_group(
    rank_spec: RankSpec, world_size: int, device: torch.device, config: TorchDistributedConfig
) -> Iterator[tuple[Group, dist.Store]]:
    """Connect the ranks, and yield their group and their store. See Note [Private world].

    Raises:
        CollectiveError: if the ranks do not connect.
    """
    timeout_s = DEBUGGED_S if any(extension.waits_for_user(config) for extension in EXTENSIONS) else TIMEOUT_S
    timeout = datetime.timedelta(seconds=timeout_s)
    credentials = _credentials(rank_spec)
    try:
        store = _store(rank_spec, world_size, credentials, timeout_s)
    except (RuntimeError, OSError) as error:
        raise CollectiveError(f"the ranks did not connect, as a rule because one is gone: {error}") from error

    def gloo(name: str, rank: int, size: int) -> Any:
        if credentials.encrypt:
            refuse_gloo()
        ip = "127.0.0.1" if rank_spec.store is None else rank_spec.ip
        return _gloo(dist.PrefixStore(name, store), rank, size, ip, timeout)

    made: list[Any] = []
    backend = _device_backend(device) if rank_spec.nccl else None

    def on_devices(name: str) -> Any:
        from lagom.exchange.device_backend import make_device_group

        _use_interface(rank_spec.ip)
        made.append(make_device_group(str(backend), device, store, name, rank_spec.rank, world_size, timeout))
        return made[-1]

    group = Group(
        rank_spec.rank,
        world_size,
        all_gather_by(SealedStore(store, rank_spec.key), "ways", rank_spec.rank, world_size, timeout_s),
        gloo,
        nccl=on_devices if backend is not None else None,
        credentials=credentials,
        ip=rank_spec.ip,
        shares_memory=config.collectives == "auto",
        timeout_s=timeout_s,
    )
    # Connect now: a rank without exchanges would end early, and break the connections that other ranks are making.
    group.connect()
    try:
        yield group, store
    finally:
        group.close()
    for one in made:
        one.shutdown()


def _credentials(rank_spec: RankSpec) -> Credentials:
    if not rank_spec.certificate:
        return Credentials(rank_spec.key)
    from lagom.wire.tls import contexts_of_ranks

    return Credentials(rank_spec.key, *contexts_of_ranks(rank_spec.certificate))


def _store(rank_spec: RankSpec, world_size: int, credentials: Credentials, timeout_s: float) -> dist.Store:
    timeout = datetime.timedelta(seconds=timeout_s)
    if rank_spec.store is None:
        store = dist.FileStore(str(Path(rank_spec.host_dir, "store")), -1)
        store.set_timeout(timeout)
        return store
    # Ranks of one host have a file, and need none of these modules.
    from lagom.exchange.sockets.rank_store import RankStore
    from lagom.exchange.sockets.value_client import ValueClient
    from lagom.exchange.sockets.value_server import ValueServer

    if rank_spec.store_fd is None:
        return RankStore(ValueClient(rank_spec.store, rank_spec.rank, credentials, timeout_s).ask, timeout)
    # The host process has bound the socket, so that the port is known, and only to the address of the chosen network.
    listener = socket.socket(fileno=os.dup(rank_spec.store_fd))
    return RankStore(ValueServer(listener, range(1, world_size), credentials, timeout_s).ask, timeout)


def _gloo(store: dist.Store, rank: int, world_size: int, ip: str, timeout: datetime.timedelta) -> Any:
    gloo_class: Any = dist.ProcessGroupGloo  # torch's type stubs lack ``_Options``
    options = gloo_class._Options()
    # Use the address: the host name resolves to 127.0.1.1 on many machines.
    options._devices = [gloo_class.create_device(hostname=ip)]
    options._timeout = timeout
    return gloo_class(store, rank, world_size, options)


def _device_backend(device: torch.device) -> str | None:
    """Return the backend by which ranks with an accelerator each exchange its tensors; None on the CPU, or without."""
    if not is_accelerator(device):
        return None
    from lagom.exchange.device_backend import device_backend

    return device_backend(device.type)


def _use_interface(ip: str) -> None:
    """Have NCCL use the network of ``ip``; other backends do not read the variable."""
    from lagom.on_rank.network_interfaces import interface_of

    if not ip.startswith("127.") and (interface := interface_of(ip)):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # ``environment`` restores it


# Note [Private world]
#
# A program that finds torch.distributed initialised behaves differently: samplers, loggers and checkpoint writers of
# many libraries ask ``is_initialized()``. It would no longer be the single-process program. So lagom never registers
# its group with torch.distributed.
