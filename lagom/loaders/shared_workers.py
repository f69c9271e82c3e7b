"""``share_workers``: rank 0 has the workers of a loader, and gives each batch to the other ranks.

See Note [One set of workers].
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lagom.collectives.agreement_exchange import SIZE, signature
from lagom.errors import DivergenceError, LagomError, PayloadError
from lagom.loaders.absent_workers import AbsentContext
from lagom.loaders.batch_broadcast import BatchBroadcast, BatchFiles
from lagom.loaders.fetching import PASS
from lagom.loaders.shared_objects import reach_shared_memory
from lagom.patching.replace import replaced
from lagom.payload import InParts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from lagom.session.session import Session

_SHARED = "_lagom_shared_workers"
_CONTEXT = "_DataLoader__multiprocessing_context"
_PLACE = "the start of a data loader's workers"


@contextmanager
def share_workers(session: Session, knows_rank: Callable[[], bool]) -> Iterator[None]:
    """Have rank 0 alone start a loader's workers, where all ranks see the same batches.

    Args:
        knows_rank: tells whether the program has asked for its rank, and so may read a loader on one rank alone.
    """
    kind = _MultiProcessingDataLoaderIter
    with ExitStack() as stack:
        stack.enter_context(replaced(kind, "__init__", _make_init(session, knows_rank)))
        stack.enter_context(replaced(kind, "_get_data", _make_get_data(session)))
        yield


def _make_init(session: Session, knows_rank: Callable[[], bool]) -> Any:
    original = vars(_MultiProcessingDataLoaderIter)["__init__"]

    def init(self: Any, loader: DataLoader[Any]) -> None:
        if not session.may_meet or type(self) is not _MultiProcessingDataLoaderIter:
            original(self, loader)
            return
        context = loader.multiprocessing_context or torch.multiprocessing

        def are_absent() -> bool:
            # The base class has begun the pass.
            if _can_meet(session, self, loader):
                cores = _agree(session, not (knows_rank() or _reach_shared_memory(loader)))
                if cores is not None:
                    self.__dict__[_SHARED] = SharedWorkers(session, cores)
            return session.rank > 0 and _SHARED in self.__dict__

        with replaced(loader, _CONTEXT, AbsentContext(context, are_absent)):
            original(self, loader)
        if _SHARED in self.__dict__:
            self.__dict__[_SHARED].place(self)

    return init


def _make_get_data(session: Session) -> Any:
    original = vars(_MultiProcessingDataLoaderIter)["_get_data"]

    def get_data(self: Any) -> Any:
        shared: SharedWorkers | None = self.__dict__.get(_SHARED)
        if session.has_joined and shared is not None:
            raise LagomError(_JOINED)
        return original(self) if shared is None or not session.live else shared.get(original, self)

    return get_data


def _can_meet(session: Session, iterator: Any, loader: DataLoader[Any]) -> bool:
    """Return whether all ranks see the same batches of this pass, at the same places of the program.

    The answer is the same on all ranks.
    """
    current, config = iterator.__dict__.get(PASS), session.config
    if current is None or current.own or current.sharded or iterator._pin_memory or not loader._auto_collation:
        return False
    whole, gathered = config.batches == "whole", config.evaluation == "gathered"
    if not (whole if current.training else gathered) or (loader.persistent_workers and not (whole and gathered)):
        return False
    if session.device.type != "cpu" and loader.multiprocessing_context is not None:
        return False  # workers that are no forks may make tensors on a GPU
    return session.group is not None and session.group.shares_memory


def _reach_shared_memory(loader: DataLoader[Any]) -> bool:
    return reach_shared_memory((loader.dataset, loader.collate_fn, loader.worker_init_fn))


def _agree(session: Session, mine: bool) -> list[list[int]] | None:
    """Return the cores of each rank if all ranks may share workers, else None; a collective."""
    assert session.group is not None
    mark = signature(_PLACE.encode())
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    rows = session.group.exchange(mark + json.dumps([mine, cores]).encode())
    if any(row[:SIZE] != mark for row in rows):
        assert session.divergence is not None
        session.divergence.find_divergence(_PLACE)
        raise DivergenceError(f"other ranks were not at {_PLACE}")
    answers = [json.loads(bytes(row[SIZE:])) for row in rows]
    return [cores for _, cores in answers] if all(may for may, _ in answers) else None


class SharedWorkers:
    """The workers of one iterator, which are processes of rank 0.

    Args:
        cores: the cores that each rank may use.
    """

    def __init__(self, session: Session, cores: list[list[int]]) -> None:
        self._session = session
        self._broadcast = BatchBroadcast(session)
        self._cores = cores

    def place(self, iterator: Any) -> None:
        """Have the workers of ``iterator`` use the cores of all ranks in turn."""
        if self._session.rank or all(cores == self._cores[0] for cores in self._cores):
            return
        for number, worker in enumerate(iterator._workers):
            with suppress(OSError):  # a container may forbid cores of another one
                os.sched_setaffinity(worker.pid, self._cores[number % len(self._cores)])

    def get(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Return what ``original(iterator)`` returns on rank 0, or raise its error; a collective in the main thread."""
        session = self._session
        way = self._broadcast if session.may_meet else BatchFiles(session, iterator.__dict__[PASS].publication())
        if not session.rank:
            return _get_and_send(way, original, iterator)
        found, error, alive = way.receive()
        for worker, is_alive in enumerate(alive):
            if iterator._workers_status[worker] and not is_alive:
                iterator._mark_worker_as_unavailable(worker)
        if error is not None:
            raise error
        return found


def _get_and_send(way: BatchBroadcast | BatchFiles, original: Callable[[Any], Any], iterator: Any) -> Any:
    try:
        found = original(iterator)
    except Exception as error:
        # A worker has died, or takes too long: errors of the data set come as data.
        try:
            way.send((None, InParts(error), iterator._workers_status))
        except PayloadError:
            way.send((None, RuntimeError(f"{type(error).__name__}: {error}"), iterator._workers_status))
        raise
    try:
        way.send((found, None, ()))
    except PayloadError as error:
        # As data, so that the iterators of all ranks know that this task is done.
        unsent = LagomError(f"a batch cannot be given to the other ranks: {error}")
        found = found[0], ExceptionWrapper((LagomError, unsent, None), "a data loader")
        way.send((found, None, ()))
    return found


_JOINED = (
    "a data loader was begun before init_process_group() and is read on after it, but lagom's ranks share its workers; "
    "call init_process_group() first"
)

# Note [One set of workers]
#
# With batches="whole" and in gathered evaluations every rank sees all batches. Were each rank to load them, R ranks
# would have R times the workers of one process, which decode every sample R times. So rank 0 has the workers, as one
# process has them: the same numbers, seeds, tasks and order. The iterators of the other ranks do all else that one
# process does (they draw from samplers, count tasks), with workers that are absent. `_get_data`, the one method by
# which an iterator receives anything from its workers, is a collective: what it returns or raises on rank 0, it returns
# or raises on all ranks. So exceptions, dead workers, timeouts, streams that end and workers that resume need nothing
# else. A rank's batches are its own, to be changed in place: bytes are copied through the memory that ranks share.
#
# Workers are processes of rank 0 alone, not of rank w mod R, since what they print and write then goes where it goes in
# one process. They run on the cores of all ranks in turn, if ranks have different ones.
#
# Ranks load everything themselves, as before: without shared memory between all ranks; where the program knows its
# rank; where a data set, a collate function or what they use holds memory that workers share with the process that
# starts them (shared_objects.py), through which a worker might tell the program something; with pinned memory; in
# threads of the program, and in loaders with iterators of their own. If a thread reads on what the main thread has
# begun with iter(), the absent workers start then.
