"""The world of Horovod in this process: its ranks and hosts, from ``hvd.init`` to ``hvd.shutdown``."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lagom.accelerators import current_accelerator
from lagom.exchange.device_backend import device_backend
from lagom.exchange.shared_memory import home
from lagom.extensions.compat.horovod.exchange import Ranks
from lagom.extensions.compat.horovod.negotiation import Negotiator
from lagom.extensions.compat.horovod.notices import Notices
from lagom.world import place_in_run

if TYPE_CHECKING:
    from lagom.extensions.compat.horovod.process_sets import ProcessSet

_FOREVER = timedelta(days=30)
"""Timeout of process groups: never reached, as negotiators notice lost ranks. See Note [Names] in negotiation.py."""


def _backend_of_devices() -> str:
    """Return the backends of a group that exchanges tensors on the CPU and on this process's accelerator."""
    device = current_accelerator()
    backend = device_backend(device.type) if device is not None else None
    return f"cpu:gloo,{device.type}:{backend}" if device is not None and backend is not None else "gloo"


class World:
    """Knows all ranks and their hosts, and keeps a negotiator for each process set of this rank.

    Args:
        number: number of worlds that this process has had before.
    """

    def __init__(self, rank: int, size: int, number: int) -> None:
        self.rank = rank
        self.size = size
        self.is_in_run = place_in_run() is not None
        self.process_sets: list[ProcessSet] = []
        self.negotiators: dict[int, Negotiator] = {}
        """Negotiators of the process sets to which this rank belongs, by number."""
        self._notices = Notices(rank, size, number)
        self._find_places()

    def add(self, process_set: ProcessSet) -> None:
        """Register a process set; a collective of all ranks."""
        members = process_set.ranks
        group = None
        if self.size > 1:
            # A group of its own, because its exchanges run beside those of the program.
            backend = None if "cpu" in dist.get_backend_config() else _backend_of_devices()
            group = dist.new_group(members, timeout=_FOREVER, backend=backend)
        process_set.process_set_id = len(self.process_sets)
        self.process_sets.append(process_set)
        if self.rank in members:
            ranks = Ranks(members, members.index(self.rank), group)
            self.negotiators[process_set.process_set_id] = Negotiator(ranks, self._notices)

    def close(self) -> None:
        """Leave all process sets, with a notice to the ranks that wait for this one."""
        self._notices.leave()
        for negotiator in self.negotiators.values():
            negotiator.close("Horovod has been shut down")
        for process_set in self.process_sets:
            process_set.process_set_id = None

    def _find_places(self) -> None:
        place = place_in_run()
        own_host = home() if self.size > 1 else ""
        own = json.dumps([own_host, place.local_rank if place is not None else -1])
        everybody = [tuple(json.loads(text)) for text in self._notices.gather("host", own)]
        hosts: dict[str, list[int]] = {}
        local_ranks = []
        for rank, (host, local_rank) in enumerate(everybody):
            ranks = hosts.setdefault(host, [])
            local_ranks.append(local_rank if local_rank >= 0 else len(ranks))
            ranks.append(rank)
        self.local_rank = local_ranks[self.rank]
        self.local_size = len(hosts[own_host])
        equals = [rank for rank in range(self.size) if local_ranks[rank] == self.local_rank]
        self.cross_rank = equals.index(self.rank)
        self.cross_size = len(equals)
        self.is_homogeneous = len({len(ranks) for ranks in hosts.values()}) == 1


_world: World | None = None
_num_worlds = 0


def begin() -> World:
    """Join the other ranks and return the new world."""
    global _world, _num_worlds  # a process has one world, as in Horovod
    _world = World(*_join_torch(), _num_worlds)
    _num_worlds += 1
    return _world


def _join_torch() -> tuple[int, int]:
    """Return rank and size of torch's default group; make that group first if it is needed."""
    if not dist.is_initialized():
        place = place_in_run()
        is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
        if place is None and not is_launched:
            return 0, 1
        if place is not None and place.world_size == 1:
            # With one rank, too, init_process_group turns lagom's patches off, as the program is distributed itself.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def shutdown() -> None:
    """Take part in nothing more; ``init`` may be called again."""
    global _world  # see begin()
    if _world is not None:
        _world.close()
        _world = None


def leave() -> None:
    """Shut down a world that began in the lagom run that ends now."""
    if _world is not None and _world.is_in_run:
        shutdown()


def world() -> World:
    """Return the world of this process.

    Raises:
        ValueError: before ``init``.
    """
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def is_initialized() -> bool:
    """Return whether ``init`` was called."""
    return _world is not None


def rank() -> int:
    """Return this process's rank."""
    return world().rank


def size() -> int:
    """Return the number of ranks."""
    return world().size


def local_rank() -> int:
    """Return the place among the ranks of this host."""
    return world().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """Return the place among the ranks that have the same local rank on their hosts."""
    return world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have equally many ranks."""
    return world().is_homogeneous


def is_available(verbose: bool = False) -> bool:
    """Return True, for gloo: programs ask about gloo to know whether exchanges work on the CPU."""
    del verbose
    return True


def is_unavailable(verbose: bool = False) -> bool:
    """Return False, for MPI, DDL, oneCCL, ROCm and NCCL; see Note [nccl_built]."""
    del verbose
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether tensors on GPUs can be exchanged."""
    del verbose
    return torch.cuda.is_available()


# Note [nccl_built]
#
# Programs call hvd.nccl_built() to find out how Adasum works: with NCCL, Horovod takes the mean over the GPUs of a
# host and the adaptive sum over hosts, so programs multiply learning rates by hvd.local_size(). lagom takes the
# adaptive sum of all ranks, as Horovod does without NCCL. So the answer is False, although tensors on GPUs go
# through NCCL where each rank has a GPU.
