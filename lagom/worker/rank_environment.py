"""The environment variables of a rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lagom.wire.spec import RankSpec
from lagom.worker.network_interfaces import interface_of
from lagom.world import Place

if TYPE_CHECKING:
    from lagom.collectives.run_store import SealedStore

# Libraries take these for the word of torchrun and behave as a rank of it. To the program, there is no such thing.
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


@contextmanager
def environment(seat: RankSpec | None) -> Iterator[None]:
    """Show the rank its own GPU and no launcher meanwhile; afterwards everything is as before."""
    before = dict(os.environ)
    if seat is not None:
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        if seat.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = seat.gpu
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def torchrun_variables(place: Place, seat: RankSpec | None, notes: SealedStore | None) -> Iterator[None]:
    """Set what torchrun would, for a program that is distributed already. See Note [The master's port].

    Without a ``seat``, in the caller's own process, variables that are there stay as they are. They are put back by
    ``environment``, inside of which this must be.
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
            # gloo resolves the host's name otherwise, which gives 127.0.1.1 on many machines.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        yield


def _master(place: Place, ip: str, held: socket.socket, notes: SealedStore | None) -> tuple[str, int]:
    """Rank 0's address and a port of its host, which its socket ``held`` keeps from being given to others."""
    if place.rank == 0:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((ip, 0))
        if notes is not None:
            notes.set(_MASTER, f"{ip} {held.getsockname()[1]}")
        return ip, held.getsockname()[1]
    assert notes is not None
    notes.wait(_MASTER, _MEET_S)
    address, port = notes.get(_MASTER).split()
    return address, int(port)


_MASTER = "master"
_MEET_S = 600.0
"""How long a rank waits for rank 0 to say where the master would be."""


# Note [The master's port]
#
# init_process_group itself never looks at MASTER_ADDR and MASTER_PORT in a rank of lagom's: it gets lagom's store (see
# Note [Joining] in distributed/init_process_group.py). They serve what is out of lagom's sight, such as a subprocess of
# every rank, or a program's own TCPStore: rank 0 opens a store there and the others connect. So nothing may listen
# there; torchrun has its own store there and tells by TORCHELASTIC_USE_AGENT_STORE, which programs that start their own
# ranks inherit to their harm: nobody is the master then. Rank 0 holds the port by a socket that is bound and does not
# listen, so that the system gives it to nobody who asks for any port, while who asks for this one gets it (both set
# SO_REUSEADDR, as torch does).
