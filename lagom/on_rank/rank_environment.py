"""The environment variables, device and number of threads of a rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lagom.accelerators import available_accelerator, select_device
from lagom.cluster import NVIDIA, device_word, kind_of_device
from lagom.errors import RankError
from lagom.plan import Plan
from lagom.wire.spec import RankSpec
from lagom.world import Place

if TYPE_CHECKING:
    from lagom.exchange.run_store import SealedStore

# Variables of torchrun and horovodrun. A library that finds them acts as on a rank of theirs, so an ordinary program
# must not see them.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)


def set_environment(variables: Mapping[str, str], *, only: bool = True) -> None:
    """Set those ``variables`` whose values differ, since each change calls libc; with ``only``, remove all others."""
    if only:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def environment(rank_spec: RankSpec | None) -> Iterator[None]:
    """Context manager that sets CUDA_VISIBLE_DEVICES for the rank and removes the variables of launchers.

    That variable is NVIDIA's own; a rank with another accelerator selects it by its name (``rank_device``).
    Without ``rank_spec``, in the caller's process, nothing is changed at first. At the end, the whole environment is
    restored.
    """
    before = dict(os.environ)
    if rank_spec is not None:
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        if rank_spec.gpu is not None and kind_of_device(rank_spec.gpu) == NVIDIA:
            os.environ["CUDA_VISIBLE_DEVICES"] = rank_spec.gpu
    try:
        yield
    finally:
        set_environment(before)


@contextmanager
def launcher_variables(place: Place, rank_spec: RankSpec | None, notes: SealedStore | None) -> Iterator[None]:
    """Set the variables of torchrun and horovodrun, for a program that is distributed already.

    See Note [The master's port]. Without ``rank_spec``, in the caller's process, variables that are set already stay.
    This does not restore the variables: ``environment``, the outer context manager, does.

    Args:
        notes: store in which rank 0 leaves its address and port; None with a single rank.

    Raises:
        TimeoutError: if rank 0 leaves no address in time.
    """
    if rank_spec is None and "RANK" in os.environ:
        yield
        return
    ip = rank_spec.ip if rank_spec is not None else "127.0.0.1"
    with socket.socket() as held:
        master = _master(place, ip, held, notes)
        os.environ |= {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "HOROVOD_RANK": str(place.rank),
            "HOROVOD_SIZE": str(place.world_size),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(place.local_world_size),
            "HOROVOD_CROSS_RANK": str(rank_spec.cross_rank if rank_spec is not None else 0),
            "HOROVOD_CROSS_SIZE": str(rank_spec.cross_size if rank_spec is not None else 1),
        }
        from lagom.on_rank.network_interfaces import interface_of  # only programs that are distributed come here

        if interface := interface_of(ip):
            # Without it gloo resolves the host's name, on many machines to 127.0.1.1.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        yield


def _master(place: Place, ip: str, held: socket.socket, notes: SealedStore | None) -> tuple[str, int]:
    """Return rank 0's address and a port of rank 0's host; on rank 0, reserve the port by the socket ``held``."""
    if place.rank == 0:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((ip, 0))
        if notes is not None:
            notes.set(_MASTER, f"{ip} {held.getsockname()[1]}")
        return ip, held.getsockname()[1]
    assert notes is not None
    address, port = notes.awaited(_MASTER, _MEET_S).split()
    return address, int(port)


_MASTER = "master"
_MEET_S = 600.0
"""Seconds that a rank waits for rank 0's address and port."""


# Note [The master's port]
#
# In a rank, init_process_group never reads MASTER_ADDR and MASTER_PORT: it gets lagom's store (see Note [Joining] in
# distributed/init_process_group.py). The variables serve code that lagom does not see, such as a subprocess of every
# rank, or the program's own TCPStore: its rank 0 opens a store at this port, and the other ranks connect. So no process
# may listen at the port before. torchrun itself has a store at its port, and says so by TORCHELASTIC_USE_AGENT_STORE;
# lagom must not do the same, since the ranks of a program that starts its own ranks inherit the variable, and then none
# of them opens the store. Rank 0 reserves the port by a socket that is bound and does not listen. The system then gives
# the port to no process that asks for any free port, but does give it to a process that asks for this port (both set
# SO_REUSEADDR, as torch does).


def rank_device(plan: Plan, entry: str | None = None, index: int = 0) -> torch.device:
    """Select and return the rank's device: the CPU in a run that was planned without accelerators.

    Args:
        entry: the rank's entry of ``visible_devices``; None if this process is to use what it finds.
        index: number of the rank's GPU in CUDA_VISIBLE_DEVICES. Other accelerators are named by ``entry``.

    Raises:
        RankError: if the run was planned with accelerators and torch finds none on this rank.
    """
    if not plan.gpu:
        return torch.device("cpu")
    device = available_accelerator()
    wanted = kind_of_device(entry)
    if device is None:
        raise RankError(f"this rank was given one {device_word(wanted)}, {_without_device(wanted)}")
    if entry is not None and device.type != wanted:
        raise RankError(
            f"this rank was given the {wanted!r} device {entry!r}, and torch's accelerator here is {device.type!r}, "
            "beside which it trains on no other kind; have the same torch, and the same packages for accelerators, "
            "where the run is planned and where the ranks run"
        )
    if entry is None or wanted == NVIDIA:
        return select_device(torch.device(device.type, index))
    return select_device(torch.device(entry))


def _without_device(kind: str) -> str:
    found = f"but torch {torch.__version__} finds none; "
    if kind != NVIDIA:
        return f"{found}install torch for {kind!r} devices where the ranks run, as on the machine that planned the run"
    return (
        f"{found}install a CUDA build of torch on the executors, or run without GPUs (CUDA_VISIBLE_DEVICES='', no "
        "spark.task.resource.gpu.amount)"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Context manager in which torch uses ``count`` threads; 0 changes nothing."""
    if count == 0:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
