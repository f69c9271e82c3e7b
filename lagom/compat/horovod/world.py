"""The world of Horovod in this process: ``init``, ``shutdown``, and who is where."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lagom.collectives.shared_memory import home
from lagom.compat.horovod.exchange import Ranks
from lagom.compat.horovod.negotiation import Negotiator
from lagom.compat.horovod.notices import Notices
from lagom.world import place_in_run

_FOREVER = timedelta(days=30)
"""For ranks that wait for others; of who is gone they hear otherwise. See Note [Names] in negotiation.py."""


class World:
    """What ``init`` makes; ``shutdown`` ends it.

    Args:
        number: how many there were before, in this process.
    """

    def __init__(self, rank: int, size: int, number: int) -> None:
        self.rank = rank
        self.size = size
        self.in_run = place_in_run() is not None
        store = distributed_c10d._get_default_store() if size > 1 else None
        self.notices = Notices(store, rank, number)
        self._groups: list[Any] = []
        self.negotiators: dict[int, Negotiator] = {0: self._negotiator(range(size))}
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next = 1
        self._find_places()

    def add_set(self, members: Sequence[int]) -> int:
        """Number of a new process set; called on all ranks.

        Raises:
            ValueError: when the ranks are none of this world, or have a set already.
        """
        wanted = tuple(sorted(members))
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(self.size)):
            raise ValueError(
                f"a process set of {list(members)}; want some of the ranks 0 to {self.size - 1}, each once"
            )
        if wanted in self.sets.values():
            raise ValueError(f"there is a process set of the ranks {list(wanted)} already")
        number, self._next = self._next, self._next + 1
        self.sets[number] = wanted
        made = self._negotiator(wanted)
        if self.rank in wanted:
            self.negotiators[number] = made
        return number

    def remove_set(self, number: int) -> bool:
        """Forget a process set; False when there is none of that number."""
        if self.sets.pop(number, None) is None:
            return False
        if number in self.negotiators:
            self.negotiators.pop(number).close("the process set was removed")
        return True

    def close(self) -> None:
        """Take part in nothing more."""
        self.notices.leave()
        for negotiator in self.negotiators.values():
            negotiator.close("Horovod has been shut down")

    def _negotiator(self, members: Sequence[int]) -> Negotiator:
        group = None
        if self.size > 1:
            # Of its own, as its exchanges go on beside the program's.
            backend = None if "cpu" in dist.get_backend_config() else "cpu:gloo,cuda:nccl"
            group = dist.new_group(list(members), timeout=_FOREVER, backend=backend)
            self._groups.append(group)
        place = list(members).index(self.rank) if self.rank in members else -1
        return Negotiator(Ranks(members, place, group), self.notices)

    def _find_places(self) -> None:
        place = place_in_run()
        mine = home() if self.size > 1 else ""
        everybody = [(mine, place.local_rank if place is not None else -1)]
        if self.size > 1:
            # Text of a fixed length, by the store: nothing is unpickled.
            store = distributed_c10d._get_default_store()
            key = f"{self.notices._prefix}/home"
            store.set(f"{key}/{self.rank}", json.dumps(everybody[0]))
            everybody = [tuple(json.loads(bytes(store.get(f"{key}/{rank}")))) for rank in range(self.size)]
        hosts = list(dict.fromkeys(host for host, _ in everybody))
        on_host = {host: [rank for rank in range(self.size) if everybody[rank][0] == host] for host in hosts}
        locals_ = [local if local >= 0 else on_host[host].index(rank) for rank, (host, local) in enumerate(everybody)]
        alike = [rank for rank in range(self.size) if locals_[rank] == locals_[self.rank]]
        self.local_rank = locals_[self.rank]
        self.local_size = len(on_host[mine])
        self.cross_rank = alike.index(self.rank)
        self.cross_size = len(alike)
        self.is_homogeneous = len({len(ranks) for ranks in on_host.values()}) == 1


_world: World | None = None
_num_worlds = 0


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the other ranks, once; further calls change nothing.

    In a lagom run that is what ``torch.distributed.init_process_group`` does: lagom steps back, and the program is
    distributed by itself. A process that nobody launched is a world of one.

    Args:
        comm: None, or a list of all ranks.
        process_sets: ``ProcessSet`` objects to be made known; or "dynamic", which changes nothing.
    """
    global _world, _num_worlds  # one of a process, as in Horovod
    if _world is not None:
        return
    rank, size = _joined()
    if comm is not None and (not isinstance(comm, (list, tuple)) or sorted(comm) not in ([], list(range(size)))):
        raise NotImplementedError(
            f"hvd.init(comm={comm!r}): a world of some ranks only, or of mpi4py, is not served by lagom; call "
            "hvd.init() and use hvd.ProcessSet for groups of ranks"
        )
    _world = World(rank, size, _num_worlds)
    _num_worlds += 1
    from lagom.compat.horovod import operations
    from lagom.compat.horovod import process_sets as sets

    operations.begin()
    sets.begin(_world, [] if process_sets is None or process_sets == "dynamic" else list(process_sets))


def _joined() -> tuple[int, int]:
    """Rank and size of torch's world, which is made if there is need of one."""
    if not dist.is_initialized():
        place = place_in_run()
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
        if place is None and not launched:
            return 0, 1
        if place is not None and place.world_size == 1:
            # Turns lagom's patches off, as for more ranks.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group()
    return dist.get_rank(), dist.get_world_size()


def shutdown() -> None:
    """Take part in nothing more; ``init`` may be called again."""
    global _world  # see init()
    if _world is not None:
        _world.close()
        _world = None


def leave() -> None:
    """At the end of a lagom run: shut down what was begun in it."""
    if _world is not None and _world.in_run:
        shutdown()


def world() -> World:
    """The one of this process.

    Raises:
        ValueError: before ``init``.
    """
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return _world is not None


def rank() -> int:
    """This process's rank."""
    return world().rank


def size() -> int:
    """Number of ranks."""
    return world().size


def local_rank() -> int:
    """Place among the ranks of this host."""
    return world().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """Place among the ranks that have this local rank on their hosts."""
    return world().cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank of this local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks."""
    return world().is_homogeneous


def gloo_built(verbose: bool = False) -> bool:
    """Programs take it for: exchanges on the CPU work. They do."""
    del verbose
    return True


def cuda_built(verbose: bool = False) -> bool:
    """Whether tensors on GPUs can be exchanged."""
    del verbose
    return torch.cuda.is_available()


def not_built(verbose: bool = False) -> bool:
    """Of MPI, DDL, oneCCL, ROCm, and NCCL; see Note [nccl_built]."""
    del verbose
    return False


def gloo_enabled() -> bool:
    """As ``gloo_built``."""
    return True


def mpi_enabled() -> bool:
    """lagom uses no MPI."""
    return False


# Note [nccl_built]
#
# Programs ask hvd.nccl_built() in order to know what Adasum does: with NCCL, Horovod takes the mean over the GPUs of a
# host and the adaptive sum of the hosts', so that learning rates are multiplied by hvd.local_size(). lagom takes the
# adaptive sum of all ranks, which Horovod does where NCCL was not built in. So the answer is no, although tensors on
# GPUs go through NCCL where each rank has one.
