"""``LoaderTrial``: compare the ranks' first batches of a loader, to find out whether sharing its workers is harmless.

See Note [Trials].
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils.worker import _IterableDatasetStopIteration
from torch.utils.weak import WeakIdKeyDictionary

from lagom.errors import CollectiveError, DivergenceError, PayloadError
from lagom.loaders.sharing.equal_batches import BatchComparison
from lagom.loaders.sharing.shared_mappings import find_files
from lagom.patching.object_reference import ObjectReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from lagom.loaders.sharing.shared_workers import SharedWorkers

NEVER, ON_TRIAL, SHARED = 0, 1, 2
"""Choices for the workers of a loader; where ranks choose differently, the least one holds."""
_MOST_BATCHES = 16
DRAIN_S = 10.0
"""Longest time between two batches while a trial ends."""


class Choices:
    """Remembers which loaders' workers may be shared, by their data sets and functions."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary(ref_type=ObjectReference)

    def find(self, loader: DataLoader[Any]) -> int:
        """Return the choice for ``loader``; ``ON_TRIAL`` if there is none yet."""
        found: int = self._known.get(_owner(loader), {}).get(_functions(loader), ON_TRIAL)
        return found

    def make_memory(self, loader: DataLoader[Any]) -> Callable[[int], None]:
        """Return a function that remembers a choice for ``loader``, and for others of its data set and functions."""
        functions, ref = _functions(loader), weakref.ref(_owner(loader))

        def remember(choice: int) -> None:
            owner = ref()
            if owner is not None:
                self._known.setdefault(owner, {})[functions] = choice

        return remember


def _owner(loader: DataLoader[Any]) -> object:
    # A list or a range cannot be referred to weakly.
    return loader.dataset if hasattr(type(loader.dataset), "__weakref__") else loader


def _functions(loader: DataLoader[Any]) -> tuple[object, ...]:
    # By their code, since bound methods and lambdas are made anew, and would keep data sets alive.
    return tuple(getattr(one, "__code__", type(one)) for one in (loader.collate_fn, loader.worker_init_fn))


class LoaderTrial:
    """Compares the first batches of an iterator, of which each rank has workers of its own so far.

    Args:
        shared: the workers as they are when the trial has ended well.
        agree: returns on all ranks whether all have given True; a collective.
        num_batches: number of batches that are compared.
    """

    def __init__(self, shared: SharedWorkers, agree: Callable[[bool], bool], num_batches: int) -> None:
        self._agree = agree
        self.shared = shared
        self._left = min(num_batches, _MOST_BATCHES)
        self._is_harmless = True
        self._files: set[tuple[str, ...]] = set()
        self.choice = ON_TRIAL
        """Findings of the trial, at its end; the same on all ranks."""

    def next(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """Return ``fetch(iterator)``, or raise its error, once all ranks have compared them; a collective."""
        found: Any = None
        error: Exception | None = None
        try:
            found = fetch(iterator)
        except Exception as raised:
            error = raised
        self._is_harmless &= self._is_equal((type(error), found))
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
        return found

    def drain(self, fetch: Callable[[Any], Any], iterator: Any) -> bool:
        """Receive what the workers of ``iterator`` still have to do, by ``fetch``, a call for each of their tasks.

        Return whether other workers may then give all that is left, on all ranks; a collective. They may not where a
        task takes long: the program may have to feed the workers, or may never ask for that batch.
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
        except Exception:  # rank 0's cannot be unpickled here
            return False
        # A worker may send the same shared memory in a second batch, with what the program has changed in the first. So
        # a batch counts as different if its shared memory was in an earlier one, and each rank keeps its workers.
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
# Sharing must not be seen in a program's numbers, and no look at a data set's code can show that: it may write files,
# count in shared memory, ask for its rank, or make batches of objects that do not travel. So each rank begins with
# workers of its own. Rank 0 gives the first batches (two of each worker) to the other ranks, which compare them with
# their own, bit for bit, and a watch in rank 0's workers notices what the other ranks would miss. If all is equal and
# nothing was noticed, all ranks wait for the tasks under way; then the others stop their workers, and rank 0's go on.
# At that moment all workers have done the same tasks, so that rank 0's are as good as a rank's own, whatever they
# remember. If not, each rank keeps its workers. Later iterators of the same data set and functions begin as the trial
# found; what the watch notices later is an error (a rank was asked for), or said and the end of sharing (files).
