"""``hvd.init``, and ``ProcessSet``: some of the ranks, which exchange among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lagom.extensions.compat.horovod import topology
from lagom.extensions.compat.horovod.exceptions import HorovodInternalError
from lagom.extensions.compat.horovod.negotiation import Negotiator


class ProcessSet:
    """Ranks that exchange among themselves, once ``init`` or ``add_process_set`` has registered them.

    Args:
        ranks_or_comm: global ranks.

    Raises:
        ValueError: for anything but a list of ranks.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError as error:
            raise ValueError(
                f"a ProcessSet of {ranks_or_comm!r}; want a list of ranks (communicators of mpi4py are not served)"
            ) from error
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"a ProcessSet of {ranks}; want a list of ranks")
        self.ranks: list[int] = ranks
        self.process_set_id: int | None = None
        self.mpi_comm = None

    def size(self) -> int | None:
        """Return the number of ranks; None before registration."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's place in the set: None before registration, -1 outside of the set."""
        if self.process_set_id is None:
            return None
        return self.ranks.index(topology.rank()) if self.included() else -1

    def included(self) -> bool:
        """Return whether this process belongs to the set."""
        return topology.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the other ranks; further calls change nothing.

    In a lagom run this is ``torch.distributed.init_process_group``: lagom steps back, because the program is
    distributed by itself. Outside of a run, it is the same if RANK and WORLD_SIZE are set, as by torchrun. A process
    that nobody launched is a world of one.

    Args:
        comm: None, or a list of all ranks.
        process_sets: ``ProcessSet`` objects to register, or "dynamic", which changes nothing.

    Raises:
        NotImplementedError: for another ``comm``.
        ValueError: as ``add_process_set``.
    """
    if topology.is_initialized():
        return
    if comm is not None and not isinstance(comm, (list, tuple)):
        raise NotImplementedError(_ALL_RANKS.format(comm))
    world = topology.begin()
    global_process_set.ranks = list(range(world.size))
    if comm and sorted(comm) != global_process_set.ranks:
        topology.shutdown()
        raise NotImplementedError(_ALL_RANKS.format(comm))
    world.add(global_process_set)
    for each in [] if process_sets in (None, "dynamic") else process_sets:
        if each.ranks != global_process_set.ranks:
            add_process_set(each)


_ALL_RANKS = (
    "hvd.init(comm={!r}): a world of some ranks only, or of mpi4py, is not served by lagom; call hvd.init() and use "
    "hvd.ProcessSet for groups of ranks"
)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. All ranks call this, also those outside of the set.

    Raises:
        ValueError: when the ranks do not exist, or form a registered set already.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world = topology.world()
    ranks = added.ranks
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world.size)):
        raise ValueError(f"a process set of {ranks}; want some of the ranks 0 to {world.size - 1}, each once")
    if any(each.ranks == ranks and each.process_set_id is not None for each in world.process_sets):
        raise ValueError(f"there is a process set of the ranks {ranks} already")
    world.add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; return False if it is not registered, or is the set of all ranks."""
    number = process_set.process_set_id
    if not number:
        return False
    process_set.process_set_id = None
    if (negotiator := topology.world().negotiators.pop(number, None)) is not None:
        negotiator.close("the process set was removed")
    return True


def negotiator_of(process_set: ProcessSet) -> Negotiator:
    """Return the negotiator of a registered process set that this rank belongs to.

    Raises:
        ValueError: when the set is not registered.
        HorovodInternalError: when this rank is not in it.
    """
    world = topology.world()
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not known; give it to hvd.init() or hvd.add_process_set() on all ranks")
    if number not in world.negotiators:
        raise HorovodInternalError(f"rank {world.rank} is not one of the ranks {process_set.ranks} of the process set")
    return world.negotiators[number]
