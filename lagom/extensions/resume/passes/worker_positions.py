"""``WorkerNotes``: the states of a loader's workers before some of their batches, kept while a pass goes on.

See Note [Workers in a snapshot] in worker_states.py.
"""

from __future__ import annotations

import itertools
import math
import pickle
import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

from lagom.batches.sample_digest import digest
from lagom.extensions.resume.passes.worker_states import (
    Question,
    WorkerAnswer,
    WorkerState,
    first_difference,
    worker_state,
)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import LoaderPass

_EVERY_S = 0.2
"""Shortest time between two questions to a worker."""
_PATIENCE_S = 5.0
"""Time between two looks at whether workers are alive."""
_WORKERS_SHARE, _OWN_SHARE = 0.005, 0.002
"""Largest shares of their time that workers and this process may spend on notes."""


NOTES, USED = "_lagom_notes", "_lagom_used"
"""Attributes of an iterator: its ``NoteTaker``; the state of the objects with which its workers have begun."""


class WorkersInPassError(pickle.PicklingError):
    """A pass cannot be kept because of its workers. Before the first batch of the workers' first pass it could be."""


@dataclass(frozen=True, slots=True)
class Note:
    """The state of a worker before it makes the batch ``task``, and the digest of this batch."""

    task: int
    state: WorkerState | None
    """None before the worker's first batch, if the worker was started for this pass."""
    digest: bytes = b""


@dataclass(slots=True)
class WorkerNotes:
    """Notes on the workers of one iterator, an entry for each worker."""

    start: list[WorkerState | None]
    """States before the pass; None for workers that were started for it."""
    first_prints: list[bytes | None]
    """Prints (``WorkerState``) in each worker's first answer, mostly after its first batch; None before this answer."""
    notes: list[list[Note]]
    """The last note of a batch that the program has, and later ones."""
    ended: list[WorkerState | None] | None = None
    """States after the pass has ended, if the workers are persistent."""

    @classmethod
    def of_new(cls, num_workers: int) -> WorkerNotes:
        """Return the notes of workers that have not begun."""
        return cls([None] * num_workers, [None] * num_workers, [[] for _ in range(num_workers)])

    def at(self, taken: int) -> WorkerNotes:
        """Return the notes that are needed to go on after ``taken`` batches.

        Raises:
            WorkersInPassError: if workers, past their first pass, have changed more of a data set than random numbers.
        """
        kept = [[one for one in notes if one.task < taken][-1:] for notes in self.notes]
        found = replace(self, notes=kept)
        states = [*self.start, *(self.ended or ()), *(note.state for notes in kept for note in notes)]
        pairs = zip(states, [*self.first_prints] * 3, strict=False)
        if any(self.start) or self.ended is not None:
            for state, first in pairs:
                if state is not None and first is not None and state.prints != first:
                    raise WorkersInPassError(
                        f"persistent workers of a loader have changed their {first_difference(first, state.prints)}"
                    )
        return found

    def first_tasks(self, *, from_start: bool) -> list[Note]:
        """Return for each worker where it has to begin again.

        This is its last note; or the first batch of the pass, with ``from_start`` or if its data set has changed.
        """
        return [self._first(worker, from_start) for worker in range(len(self.start))]

    def _first(self, worker: int, from_start: bool) -> Note:
        note = self.notes[worker][-1] if self.notes[worker] else None
        state = note.state if note is not None else None
        if note is None or state is None or from_start or state.prints != self.first_prints[worker]:
            return Note(worker, self.start[worker])
        return note


class NoteTaker:
    """Takes notes of the workers of an iterator, whose queues it wraps for this.

    Args:
        notes: the notes so far.
    """

    def __init__(self, iterator: Any, notes: WorkerNotes) -> None:
        self._num_workers, self.notes, self._iterator = iterator._num_workers, notes, weakref.ref(iterator)
        self.has_failed = False
        """Whether a batch could not be made, or a worker could not answer."""
        self._due_at = [0.0] * self._num_workers
        taken = iterator._num_yielded
        self.open = {} if taken else {number: Note(number, notes.start[number]) for number in range(self._num_workers)}
        """Notes of batches that workers have not made yet, by task."""
        iterator._data_queue = _Results(iterator._data_queue, self)
        iterator._index_queues = [_Tasks(queue, self, worker) for worker, queue in enumerate(iterator._index_queues)]

    def begin_pass(self, iterator: Any) -> None:
        """Begin another pass of persistent workers."""
        start = self.notes.ended or ask_workers(iterator)
        self.has_failed = self.has_failed or None in start
        self.notes = WorkerNotes(start, self.notes.first_prints, [[] for _ in start])
        self.open, self._due_at = {}, [0.0] * len(start)

    def end_pass(self, iterator: Any) -> None:
        """Record the state of each persistent worker at the end of a pass; the next pass begins from these states."""
        self.notes.ended = ask_workers(iterator)
        self.has_failed = self.has_failed or None in self.notes.ended

    def question(self, worker: int, task: int) -> Question | None:
        """Return what ``worker`` should be asked before its batch ``task``; None for no question."""
        if task < self._num_workers:
            self.open[task] = Note(task, self.notes.start[worker])
            return None
        if self.notes.first_prints[worker] is not None and perf_counter() < self._due_at[worker]:
            return None
        self._due_at[worker] = math.inf
        return Question(task)

    def answered(self, answer: WorkerAnswer) -> None:
        """Note an answer."""
        if answer.state is None:
            self.has_failed = True
            return
        worker = answer.task % self._num_workers
        self.open[answer.task] = Note(answer.task, answer.state)
        self._due_at[worker] = perf_counter() + max(_EVERY_S, answer.seconds / _WORKERS_SHARE)
        if self.notes.first_prints[worker] is None:
            self.notes.first_prints[worker] = answer.state.prints

    def received(self, task: int, data: Any) -> None:
        """Note the digest of the batch ``task``, if the state of its worker before the batch is known."""
        note = self.open.pop(task, None)
        if isinstance(data, ExceptionWrapper):
            self.has_failed = True
            return
        iterator = self._iterator()
        if note is None or iterator is None:
            return
        start, worker = perf_counter(), task % self._num_workers
        notes = self.notes.notes[worker]
        notes.append(replace(note, digest=digest(data, exact=True)))
        while len(notes) > 1 and notes[1].task < iterator._rcvd_idx:
            del notes[0]
        end = perf_counter()
        self._due_at[worker] = max(self._due_at[worker], end + (end - start) * self._num_workers / _OWN_SHARE)


def ask_workers(iterator: Any, states: Sequence[WorkerState | None] = ()) -> list[WorkerState | None]:
    """Return the states of all workers after their queued tasks, whose results are dropped; None for unknown states.

    Args:
        states: random states that the workers take first.
    """
    waiting = {worker for worker, process in enumerate(iterator._workers) if process.is_alive()}
    for worker in waiting:
        iterator._index_queues[worker].put(Question(-1 - worker, states[worker] if states else None))
    results, states_of_workers = iterator._data_queue, list[WorkerState | None]([None] * iterator._num_workers)
    results = results.queue_of_workers if isinstance(results, _Results) else results
    while waiting:
        try:
            answer, _ = results.get(timeout=_PATIENCE_S)
        except queue.Empty:
            waiting = {worker for worker in waiting if iterator._workers[worker].is_alive()}
            continue
        if type(answer) is WorkerAnswer and answer.task < 0:
            worker = -1 - answer.task
            waiting.discard(worker)
            states_of_workers[worker] = answer.state
    return states_of_workers


def set_workers(iterator: Any, states: Sequence[WorkerState | None]) -> bool:
    """Have workers take ``states``; return whether all have done so. True on a rank whose workers are rank 0's."""
    found = ask_workers(iterator, states)
    return None not in found or not any(process.is_alive() for process in iterator._workers)


def replay(
    iterator: Any, firsts: Sequence[Note], checks: Sequence[Note], taken: int, made_batch: Callable[[], None]
) -> bool:
    """Have each worker make its batches from its note of ``firsts`` on again, up to ``taken``; drop them.

    Return whether the batches of which ``checks`` has notes are as they were.

    Args:
        taken: number of batches that the program has taken.
        made_batch: called for each batch.
    """
    wanted, under_way, is_same = {note.task: note.digest for note in checks}, 0, True
    most = iterator._prefetch_factor * iterator._num_workers

    def receive() -> bool:
        task, data = iterator._get_data()
        made_batch()
        return task not in wanted or digest(data, exact=True) == wanted[task]

    for task, index in enumerate(itertools.islice(iterator._sampler_iter, taken)):
        worker = task % iterator._num_workers
        if task < firsts[worker].task:
            continue
        iterator._index_queues[worker].put((task, index))
        under_way += 1
        if under_way == most:
            is_same &= receive()
            under_way -= 1
    for _ in range(under_way):
        is_same &= receive()
    return is_same


def note_workers(iterator: Any, notes: WorkerNotes | None = None) -> NoteTaker | None:
    """Take notes of the workers of ``iterator`` from now on; return the taker, None where no notes can be taken.

    Args:
        notes: notes of workers that have gone on from a snapshot.
    """
    held = vars(iterator)
    results = held.get("_worker_result_queue") if type(iterator) is _MultiProcessingDataLoaderIter else None
    if NOTES not in held and isinstance(results, Queue) and not is_stream(iterator):
        held[NOTES] = NoteTaker(iterator, notes or WorkerNotes.of_new(iterator._num_workers))
    taker: NoteTaker | None = held.get(NOTES)
    return taker


def notes_in_pass(iterator: Any, loader: DataLoader[Any], current: LoaderPass, *, is_first: bool) -> WorkerNotes | None:
    """Return the notes of the workers of ``iterator`` that are needed to go on with its pass; None if none are needed.

    Args:
        is_first: whether the pass ``current`` is the first of these workers.

    Raises:
        WorkersInPassError: if the pass cannot go on with these workers.
    """
    held = vars(iterator)
    notes: NoteTaker | None = held.get(NOTES)
    if is_first and not iterator._num_yielded and not current.ended:
        return None
    if is_stream(loader) and not is_first:
        raise WorkersInPassError("persistent workers have read an iterable data set before")
    if not iterator._in_order:
        raise WorkersInPassError("a loader with workers has in_order=False")
    if current.is_split:
        raise WorkersInPassError('a loader with workers is read with evaluation="sharded"')
    if not is_stream(loader) and notes is None:
        raise WorkersInPassError("the workers of a loader are not processes")
    if notes is not None and notes.has_failed:
        raise WorkersInPassError("a batch of a loader with workers could not be made")
    if held[USED] != (now := used_by_workers(loader)):
        kind = first_difference(held[USED].prints, now.prints)
        raise WorkersInPassError(f"the program has changed a {kind} since the workers of a loader have got it")
    return notes.notes.at(iterator._num_yielded) if notes is not None else None


def used_by_workers(loader: DataLoader[Any]) -> WorkerState:
    """Return the state that the workers of ``loader`` get if they begin now."""
    return worker_state((loader.dataset, loader.collate_fn, loader.worker_init_fn), of_process=False)


def is_stream(loader: Any) -> bool:
    """Return whether a loader, or its iterator, reads an iterable data set, which has no indices to skip."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


class _Results:
    """The queue of the workers' results, from which answers to questions are taken out."""

    def __init__(self, results: Any, taker: NoteTaker) -> None:
        self.queue_of_workers, self._taker = results, taker

    def get(self, timeout: float | None = None) -> Any:
        while True:
            found = self.queue_of_workers.get(timeout=timeout)
            task, data = found
            if type(task) is WorkerAnswer:
                self._taker.answered(task)
                continue
            if task in self._taker.open or isinstance(data, ExceptionWrapper):
                self._taker.received(task, data)
            return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue_of_workers, name)


class _Tasks:
    """The queue of the tasks of one worker, with questions among them."""

    def __init__(self, tasks: Any, taker: NoteTaker, worker: int) -> None:
        self._tasks, self._taker, self._worker = tasks, taker, worker

    def put(self, item: Any) -> None:
        if type(item) is tuple and (question := self._taker.question(self._worker, item[0])) is not None:
            self._tasks.put(question)
        self._tasks.put(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)
