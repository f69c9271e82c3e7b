"""``ProcessSet``: some of the ranks, which exchange among themselves."""

from __future__ import annotations

from collections.abc import Sequence

from lagom.compat.horovod import world as worlds
from lagom.compat.horovod.errors import HorovodInternalError
from lagom.compat.horovod.negotiation import Negotiator


class ProcessSet:
    """Ranks that exchange among themselves, once ``hvd.init`` or ``add_process_set`` was given this.

    Args:
        ranks_or_comm: their ranks.
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
        """Number of its ranks; None before it is known."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it; None before it is known, -1 outside of it."""
        if self.process_set_id is None:
            return None
        own = worlds.rank()
        return self.ranks.index(own) if own in self.ranks else -1

    def included(self) -> bool:
        """Whether this process is one of it."""
        return worlds.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
_known: list[ProcessSet] = []


def begin(world: worlds.World, wanted: Sequence[ProcessSet]) -> None:
    """Make all ranks and the ``wanted`` sets known, in a new world."""
    for each in _known:
        each.process_set_id = None
    _known.clear()
    global_process_set.process_set_id, global_process_set.ranks = 0, list(range(world.size))
    for each in wanted:
        if each.ranks != global_process_set.ranks:
            add_process_set(each)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set known; all ranks call this, also those that are not in it.

    Raises:
        ValueError: when there is one of these ranks already, or no such ranks.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    made.process_set_id = worlds.world().add_set(made.ranks)
    _known.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; False when it is not known, or is that of all ranks."""
    number = process_set.process_set_id
    if not number:
        return False
    process_set.process_set_id = None
    return worlds.world().remove_set(number)


def negotiator(process_set: ProcessSet) -> Negotiator:
    """Of a process set that this rank is in.

    Raises:
        ValueError: when it is not known.
        HorovodInternalError: when this rank is not in it.
    """
    world = worlds.world()
    number = process_set.process_set_id
    if number is None or number not in world.sets:
        raise ValueError(f"{process_set} is not known; give it to hvd.init() or hvd.add_process_set() on all ranks")
    if number not in world.negotiators:
        raise HorovodInternalError(f"rank {world.rank} is not one of the ranks {process_set.ranks} of the process set")
    return world.negotiators[number]
