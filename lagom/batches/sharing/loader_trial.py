"""``LoaderTrial``: compare the ranks' first batches of a loader, to find out whether sharing its workers is harmless.

See Note [Trials].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data._utils.worker import _IterableDatasetStopIteration
from torch.utils.weak import WeakIdKeyDictionary

from lagom.batches.sharing.equal_batches import BatchComparison
from lagom.batches.sharing.shared_objects import find_files
from lagom.errors import CollectiveError, DivergenceError, PayloadError
from lagom.patching.object_reference import HiddenReference, ObjectReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from lagom.batches.sharing.shared_workers import SharedWorkers

NEVER, ON_TRIAL, SHARED = 0, 1, 2
"""Choices for the workers of a loader; if ranks choose differently, the smallest choice holds."""
_MOST_BATCHES = 16
DRAIN_S = 10.0
"""Longest wait for the result of one outstanding task when a trial ends."""


class Choices:
    """Remembers which loaders' workers may be shared, by their data sets and functions."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary(ref_type=ObjectReference)

    def find(self, loader: DataLoader[Any]) -> int:
        """Return the choice for ``loader``; ``ON_TRIAL`` if there is none yet."""
        found: int = self._known.get(owner_of(loader), {}).get(functions_of(loader), ON_TRIAL)
        return found

    def make_memory(self, loader: DataLoader[Any]) -> Callable[[int], None]:
        """Return a function that remembers a choice for all loaders with the data set and functions of ``loader``."""
        functions, ref = functions_of(loader), HiddenReference(owner_of(loader))

        def remember(choice: int) -> None:
            owner = ref()
            if owner is not None:
                self._known.setdefault(owner, {})[functions] = choice

        return remember


def owner_of(loader: DataLoader[Any]) -> object:
    """Return the object to which a finding about ``loader`` belongs."""
    # A list or a range cannot have weak references, so the loader itself is the key.
    return loader.dataset if hasattr(type(loader.dataset), "__weakref__") else loader


def functions_of(loader: DataLoader[Any]) -> tuple[object, ...]:
    """Return a key of the functions that make the batches of ``loader``."""
    # Functions are identified by their code: bound methods and lambdas are new objects for each loader, and would keep
    # data sets alive.
    return tuple(getattr(one, "__code__", type(one)) for one in (loader.collate_fn, loader.worker_init_fn))


class LoaderTrial:
    """Compares the first batches of an iterator between ranks, while each rank still has its own workers.

    Args:
        shared: the workers to be shared, if the trial finds this harmless.
        agree: returns, on all ranks, whether all ranks have passed True; a collective.
        num_batches: number of batches to compare; at most 16 are compared.
    """

    def __init__(self, shared: SharedWorkers, agree: Callable[[bool], bool], num_batches: int) -> None:
        self._agree = agree
        self.shared = shared
        self._left = min(num_batches, _MOST_BATCHES)
        self._is_harmless = True
        self._files: set[tuple[str, ...]] = set()
        self.choice = ON_TRIAL
        """``SHARED`` or ``NEVER`` when the trial has ended, ``ON_TRIAL`` before; equal on all ranks."""

    def next(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """Return ``fetch(iterator)``, or raise its error, after ranks have compared their results; a collective."""
        result: Any = None
        error: Exception | None = None
        try:
            result = fetch(iterator)
        except Exception as raised:
            error = raised
        self._is_harmless &= self._is_equal((type(error), result))
        self._left -= 1
        if not self._left or error is not None:
            is_harmless = self._is_harmless and isinstance(error, StopIteration | None)
            watch = self.shared.watch
            noticed = watch is not None and (watch.has_changed or watch.has_asked)
            self._is_harmless = self._agree(is_harmless and not noticed)
            self.choice = SHARED if self._is_harmless else NEVER
            self.shared.remember(self.choice)
        if error is not None:
            raise error
        return result

    def drain(self, fetch: Callable[[Any], Any], iterator: Any) -> bool:
        """Receive the results of all outstanding tasks of ``iterator``, one by each ``fetch``; a collective.

        Return whether all ranks succeeded, so that rank 0's workers can do all further tasks. A rank fails if the
        stream of a worker ends or has ended, or if a task takes long: the program may have to feed the workers first,
        or may never ask for that batch. An error of ``fetch`` is raised after ranks have agreed.
        """
        running = set(iterator._workers_status)
        is_drained = len(running) == 1
        limit_s = min(DRAIN_S, iterator._timeout / 2) if iterator._timeout > 0 else DRAIN_S
        error: Exception | None = None
        try:
            while is_drained and iterator._tasks_outstanding:
                if not iterator._worker_result_queue._reader.poll(limit_s):
                    is_drained = False
                    break
                index, data = fetch(iterator)
                iterator._tasks_outstanding -= 1
                if isinstance(data, _IterableDatasetStopIteration):
                    _end_worker(iterator, data.worker_id)
                    is_drained = False  # which worker gets the next task now depends on which rank is faster
                else:
                    iterator._task_info[index] += (data,)
        except Exception as raised:
            is_drained, error = False, raised
        is_drained = self._agree(is_drained)
        if error is not None:
            raise error
        return is_drained

    def _is_equal(self, mine: tuple[type, Any]) -> bool:
        broadcast = self.shared.broadcast
        if self.shared.watch is not None:
            try:
                broadcast.send(mine)
            except PayloadError:
                broadcast.send(None)
                return False
            return True
        comparison = BatchComparison()
        try:
            is_equal = comparison.match(mine, broadcast.receive())
        except (CollectiveError, DivergenceError):
            raise
        except Exception:  # rank 0's batch cannot be unpickled on this rank
            return False
        # A worker may send the same shared memory in two batches; the second then includes the program's changes to the
        # first. So a batch counts as different if its shared memory was in an earlier batch, and each rank keeps its
        # workers.
        files = find_files(comparison.addresses)
        is_equal = is_equal and not files & self._files
        self._files |= files
        return is_equal


def _end_worker(iterator: Any, worker: int) -> None:
    """Do what ``_next_data`` does when the stream of a worker ends."""
    if iterator._persistent_workers:
        iterator._workers_status[worker] = False
    else:
        iterator._mark_worker_as_unavailable(worker)
    iterator._try_put_index()


# Note [Trials]
#
# Sharing must not change a program's numbers. The code of a data set cannot show whether it does: the data set may
# write files, count in shared memory, ask for its rank, or make batches of objects that cannot be sent. So each rank
# begins with workers of its own. Rank 0 gives the first batches (two of each worker, 16 at most) to the other ranks,
# which compare them with their own, bit for bit. A watch in rank 0's workers notices side effects that the other ranks
# would miss. If all batches are equal and there are no side effects, all ranks wait for the tasks under way. Then the
# other ranks stop their workers, and rank 0's go on. At that moment all workers have done the same tasks, so rank 0's
# workers can replace a rank's own even if they have state. Otherwise each rank keeps its workers.
#
# Later iterators over the same data set with the same functions follow the finding without a trial. The watch goes on:
# it is an error if a worker asks for its rank later. If a worker changes files, maps shared memory or starts a program
# later, the user is warned, and later iterators no longer share workers.
