"""The environment variables of a rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lagom.wire.spec import RankSpec
from lagom.worker.network_interfaces import interface_of
from lagom.world import Place

if TYPE_CHECKING:
    from lagom.collectives.run_store import SealedStore

# Libraries read these as set by torchrun, and behave as one of its ranks. The program must not see any.
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


def set_environment(variables: Mapping[str, str], *, only: bool = True) -> None:
    """Set what differs in ``variables``, as each change is a call of libc; with ``only``, remove all others."""
    if only:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def environment(seat: RankSpec | None) -> Iterator[None]:
    """Show the rank its own GPU and no launcher's variables; restore the environment afterwards."""
    before = dict(os.environ)
    if seat is not None:
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        if seat.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = seat.gpu
    try:
        yield
    finally:
        set_environment(before)


@contextmanager
def torchrun_variables(place: Place, seat: RankSpec | None, notes: SealedStore | None) -> Iterator[None]:
    """Set torchrun's variables, for a program that is distributed already. See Note [The master's port].

    Without a ``seat``, in the caller's own process, existing variables stay. ``environment``, the outer context,
    restores all variables.
    """
    if seat is None and "RANK" in os.environ:
        yield
        return
    ip = seat.ip if seat is not None else "127.0.0.1"
    with socket.socket() as held:
        master = _master(place, ip, held, notes)
        os.environ |= {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }
        if interface := interface_of(ip):
            # Otherwise gloo resolves the host's name, to 127.0.1.1 on many machines.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        yield


def _master(place: Place, ip: str, held: socket.socket, notes: SealedStore | None) -> tuple[str, int]:
    """Return rank 0's address and a port of its host, which its socket ``held`` reserves."""
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
"""Time that a rank waits for rank 0's address and port."""


# Note [The master's port]
#
# init_process_group itself never reads MASTER_ADDR and MASTER_PORT in a rank of lagom's: it gets lagom's store (see
# Note [Joining] in distributed/init_process_group.py). The variables serve code that lagom does not see, such as a
# subprocess of every rank, or a program's own TCPStore: rank 0 opens a store there and the others connect. So no
# process may listen there. torchrun has its own store there, and says so by TORCHELASTIC_USE_AGENT_STORE; a program
# that starts ranks of its own inherits the variable, and then no rank opens the store. Rank 0 reserves the port by a
# socket that is bound and does not listen: the system gives the port to no process that asks for any port, and still to
# one that asks for this port (both set SO_REUSEADDR, as torch does).
