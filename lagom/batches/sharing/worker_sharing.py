"""``share_workers``: patch torch's iterator so that rank 0 alone has workers, and gives their batches to all ranks.

See Note [One set of workers].
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.multiprocessing
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lagom.batches.sharing.absent_workers import WorkerContext, start_workers
from lagom.batches.sharing.loader_trial import NEVER, ON_TRIAL, SHARED, Choices, LoaderTrial
from lagom.batches.sharing.shared_objects import SharedMappings, reach_shared_memory
from lagom.batches.sharing.shared_workers import SharedWorkers
from lagom.batches.sharing.worker_watch import WorkerWatch
from lagom.disk.install import reports_changes
from lagom.errors import DivergenceError, LagomError
from lagom.exchange.agreement_exchange import SIZE, signature
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

_SHARED = "_lagom_shared_workers"
_TRIAL = "_lagom_trial"
_CONTEXT = "_DataLoader__multiprocessing_context"
_PLACE = "the start of a data loader's workers"
_ALARMS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
_BATCHES_PER_WORKER = 2


@contextmanager
def share_workers(
    session: Session, pass_of: Callable[[Any], LoaderPass | None], knows_rank: Callable[[], bool]
) -> Iterator[None]:
    """Patch torch's iterator: if all ranks see the same batches, they may share the workers of rank 0.

    Args:
        pass_of: returns the pass of a loader's iterator.
        knows_rank: tells whether the program has asked for its rank, and so may read a loader on one rank alone.
    """
    kind, sharing = _MultiProcessingDataLoaderIter, WorkerSharing(session, pass_of, knows_rank)
    with ExitStack() as stack:
        stack.enter_context(replaced(kind, "__init__", _make_init(sharing)))
        stack.enter_context(replaced(kind, "_get_data", _make_get_data(session)))
        stack.enter_context(replaced(kind, "_next_data", _make_next_data(sharing)))
        yield


def _make_init(sharing: WorkerSharing) -> Any:
    original = vars(_MultiProcessingDataLoaderIter)["__init__"]

    def init(self: Any, loader: DataLoader[Any]) -> None:
        if not sharing.session.may_meet or type(self) is not _MultiProcessingDataLoaderIter:
            original(self, loader)
            return
        context = loader.multiprocessing_context or torch.multiprocessing
        # torch makes the first queue after the base class's ``__init__`` has begun the pass, which ``begin`` needs.
        with replaced(loader, _CONTEXT, WorkerContext(context, lambda: sharing.begin(self, loader, context))):
            original(self, loader)
        if _SHARED in self.__dict__:
            self.__dict__[_SHARED].place(self)

    return init


def _make_get_data(session: Session) -> Any:
    original = vars(_MultiProcessingDataLoaderIter)["_get_data"]

    def get_data(self: Any) -> Any:
        shared: SharedWorkers | None = self.__dict__.get(_SHARED)
        if shared is None or not (session.live or session.has_joined):
            return original(self)
        if session.has_joined:
            raise LagomError(_JOINED)
        if session.may_meet:
            return shared.get(original, self)
        if shared.has_given:
            raise LagomError(_THREAD)
        # A thread reads an iterator that the main thread has begun. Threads of different ranks may read different
        # numbers of batches, so each rank starts its own workers.
        del self.__dict__[_SHARED]
        if session.rank:
            start_workers(self)
        return original(self)

    return get_data


def _make_next_data(sharing: WorkerSharing) -> Any:
    original = vars(_MultiProcessingDataLoaderIter)["_next_data"]
    get_data = vars(_MultiProcessingDataLoaderIter)["_get_data"]

    def next_data(self: Any) -> Any:
        trial: LoaderTrial | None = self.__dict__.get(_TRIAL)
        if trial is None:
            return original(self)
        if not sharing.session.may_meet or sharing.knows_rank():  # no trial in threads, or where ranks may differ
            del self.__dict__[_TRIAL]
            return original(self)
        if trial.choice == ON_TRIAL:
            return trial.next(original, self)
        del self.__dict__[_TRIAL]
        if trial.choice == SHARED and trial.drain(get_data, self):
            self.__dict__[_SHARED] = trial.shared
            trial.shared.take_over(self)
            sharing.mark_shared(self)
        return original(self)

    return next_data


class WorkerSharing:
    """Decides for each new iterator: share rank 0's workers, start workers on each rank, or make a trial."""

    def __init__(
        self, session: Session, pass_of: Callable[[Any], LoaderPass | None], knows_rank: Callable[[], bool]
    ) -> None:
        self.session = session
        self._pass_of, self.knows_rank = pass_of, knows_rank
        self._choices = Choices()
        self._mappings = SharedMappings()
        self._alarms = [signal.getsignal(one) for one in _ALARMS]

    def begin(self, iterator: Any, loader: DataLoader[Any], context: Any) -> tuple[bool, WorkerWatch | None]:
        """Return whether this rank has no workers because rank 0's serve it, and a ``WorkerWatch`` or None.

        A collective, if ``_can_meet``. Only rank 0 has a watch.
        """
        session = self.session
        if not self._can_meet(iterator, loader):
            return False, None
        choice, cores = _agree(session, self._choose(loader, context.get_start_method() == "fork"))
        if choice == NEVER:
            return False, None
        watch = WorkerWatch(context) if not session.rank else None
        shared = SharedWorkers(session, cores, watch, self._choices.make_memory(loader))
        if choice == SHARED:
            iterator.__dict__[_SHARED] = shared
            self.mark_shared(iterator)
            return session.rank > 0, watch
        num_batches = _BATCHES_PER_WORKER * loader.num_workers
        iterator.__dict__[_TRIAL] = LoaderTrial(shared, lambda mine: bool(_agree(session, mine)[0]), num_batches)
        return False, watch

    def mark_shared(self, iterator: Any) -> None:
        """Record that one set of workers serves all ranks in the pass of ``iterator``."""
        if (current := self._pass_of(iterator)) is not None:
            current.loading = "shared"

    def _can_meet(self, iterator: Any, loader: DataLoader[Any]) -> bool:
        """Return whether all ranks see the same batches of this pass, in a loader whose workers they may share.

        The answer is the same on all ranks.
        """
        session, current, config = self.session, self._pass_of(iterator), self.session.config
        if current is None or current.own or current.is_split or iterator._pin_memory:
            return False
        whole, gathered = config.batches == "whole", config.evaluation == "gathered"
        if not (whole if current.training else gathered) or (loader.persistent_workers and not (whole and gathered)):
            return False
        if session.device.type != "cpu" and loader.multiprocessing_context is not None:
            return False  # workers that are not forked may make tensors on a GPU
        return session.group is not None and session.group.shares_memory

    def _choose(self, loader: DataLoader[Any], is_fork: bool) -> int:
        if self.knows_rank() or reach_shared_memory((loader.dataset, loader.collate_fn, loader.worker_init_fn)):
            return NEVER
        if self.session.config.share_loading is True:
            # Samples that are not collated may be objects of the data set itself, which workers send again and again.
            return SHARED if loader._auto_collation else NEVER
        is_watched = not is_fork or self.session.rank > 0 or reports_changes()
        # The handler of an alarm may raise in the middle of an exchange.
        has_alarm = [signal.getsignal(one) for one in _ALARMS] != self._alarms
        if not is_watched or not loader.in_order or has_alarm or self._mappings.has_new():
            return NEVER
        return self._choices.find(loader)


def _agree(session: Session, mine: int) -> tuple[int, list[list[int]]]:
    """Return the smallest ``mine`` of all ranks, and the cores of each rank; a collective."""
    assert session.group is not None
    mark = signature(_PLACE.encode())
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    rows = session.group.exchange(mark + json.dumps([mine, cores]).encode())
    if any(row[:SIZE] != mark for row in rows):
        assert session.backwards.divergence is not None
        session.backwards.divergence.find_divergence(_PLACE)
        raise DivergenceError(f"other ranks were not at {_PLACE}")
    answers = [json.loads(bytes(row[SIZE:])) for row in rows]
    return min(answer for answer, _ in answers), [cores for _, cores in answers]


_JOINED = (
    "a data loader was begun before init_process_group() and is read on after it, but lagom's ranks share its workers; "
    "call init_process_group() first"
)
_THREAD = (
    "a thread reads on what the main thread has read so far, but lagom's ranks share the workers of this data loader, "
    "and their threads need not read as far as each other; use share_loading=False"
)

# Note [One set of workers]
#
# With batches="whole" and in gathered evaluations every rank sees all batches. If each rank loaded them itself, R ranks
# would have R times as many workers as one process, and decode every sample R times. So only rank 0 has workers, with
# the same number, seeds, tasks and order as in one process. The iterators of the other ranks do everything else that
# one process does (draw from samplers, count tasks), with absent workers. An iterator receives from its workers by one
# method, `_get_data`. This method becomes a collective: a value or an error on rank 0 is returned or raised on all. So
# errors, dead workers, timeouts, streams that end and workers that resume need no code of their own. Each rank may
# change its batches in place, since it gets a copy through the memory that ranks share.
#
# All workers are processes of rank 0, instead of worker w being a process of rank w mod R, so that their output and
# files go where they go in one process. They run on the cores of all ranks in turn, if ranks have different ones.
#
# Each rank has its own workers in these cases:
#
# - There is no memory that all ranks share.
# - The program has asked for its rank.
# - The data set, collate_fn, worker_init_fn or an object that these use holds memory, pipes or files that workers share
#   with the process that starts them (shared_objects.py): a worker might pass data to the program through these.
# - The loader pins memory, has an iterator class of its own, or reads a data set that shards itself.
# - The loader keeps its workers (persistent_workers), and training and evaluation do not both see whole batches.
# - Ranks use GPUs, and the loader names a multiprocessing context: its workers may make tensors on a GPU.
# - share_loading is False; or it is True, and the loader does not collate samples into batches.
# - A thread of the program reads the loader. If the main thread has begun the iteration with iter(), the absent workers
#   start when the thread first reads.
#
# share_loading="auto" has more such cases, such as a handler for alarms, which may interrupt an exchange, and shares
# only after a trial: see Note [Trials] in loader_trial.py.
