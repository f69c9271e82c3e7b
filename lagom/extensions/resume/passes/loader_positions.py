"""Positions of loaders: a pass begins again with its first random states, and skips or repeats the batches so far."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from lagom.batches.sample_digest import digest
from lagom.errors import SnapshotError
from lagom.extensions.resume.passes.worker_positions import (
    WorkerNotes,
    is_stream,
    note_workers,
    notes_in_pass,
    replay,
    set_workers,
)
from lagom.patching.replace import replaced
from lagom.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOADER, MADE = "_lagom_loader", "_lagom_made"
"""Attributes of an iterator: a function that returns its loader; generators' states when the iterator was made."""
PASS_START, FIRST_BATCH, LAST_BATCH = "_lagom_pass_start", "_lagom_first_batch", "_lagom_last_batch"
"""Attributes of an iterator: generators' states at the start of its pass and when its first batch was asked for; the
digest of its last batch."""
_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw random numbers at their first item only, and do not change."""


@dataclass(slots=True)
class PassStart:
    """States that a pass may change: of generators, and of samplers with ``lagom_common``, such as a table's."""

    common: Mapping[str, Any]
    own: Sequence[tuple[Any, Any]]

    def restore(self) -> None:
        """Set the generators and the sampler to these states."""
        set_random_states(self.common)
        for one, state in self.own:
            if isinstance(one, torch.Generator):
                one.set_state(state)
            else:
                vars(one).update(state)

    def now(self) -> PassStart:
        """Return the present states of the same generators and the same sampler."""
        return PassStart(random_states(), [(one, _state_of(one)) for one, _ in self.own])


def pass_start(loader: DataLoader[Any]) -> PassStart:
    """Return the present states of the global generators, and of the generators and such samplers of ``loader``."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    own: list[Any] = [
        one for holder in holders if isinstance(one := getattr(holder, "generator", None), torch.Generator)
    ]
    own += [holder for holder in holders if getattr(holder, "lagom_common", False)]
    found = {id(one): one for one in own}
    return PassStart(random_states(), [(one, _state_of(one)) for one in found.values()])


def _state_of(one: Any) -> Any:
    return one.get_state() if isinstance(one, torch.Generator) else dict(vars(one))


@dataclass(slots=True)
class LoaderPosition:
    """The position of an iterator of a loader: where another process begins it again."""

    loader: DataLoader[Any]
    made: PassStart
    """States when the iterator was made; persistent workers were begun then."""
    start: PassStart
    """States when its pass began."""
    first: PassStart | None
    """States when the first batch of the pass was asked for; None before, and with workers."""
    taken: int
    """Batches that it has given."""
    ended: bool
    training: bool
    by_mode: bool
    last: bytes
    """Digest of the last batch of an iterable data set, whose batches are read again; else empty."""
    workers: WorkerNotes | None


def reduce_iterator(iterator: Any) -> Any:
    """Return how to pickle a loader's iterator: as its position; empty if its pass and its workers have ended.

    Raises:
        PicklingError: if another process could not go on with the pass.
    """
    held = vars(iterator)
    start = held.get(PASS_START)
    loader = held[LOADER]() if start is not None else None
    if loader is None:
        return NotImplemented
    current, taken = held["_lagom_pass"], iterator._num_yielded
    if current.ended and not iterator._persistent_workers:
        return iter, ((),)
    if type(iterator) not in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
        raise pickle.PicklingError(f"{type(loader).__name__} has an iterator of its own")
    if not is_stream(loader) and not _repeats_order(loader):
        raise pickle.PicklingError("a loader with a sampler of the program's own is in a pass")
    is_first = held[MADE] is start
    workers = notes_in_pass(iterator, loader, current, is_first=is_first) if iterator._num_workers else None
    last = held[LAST_BATCH] if taken and is_stream(loader) else b""
    position = LoaderPosition(
        loader,
        held[MADE],
        start,
        held.get(FIRST_BATCH),
        taken,
        current.ended,
        current.training,
        current.by_mode,
        last,
        workers,
    )
    return _empty, (type(iterator),), position, None, None, _begin_later


def _repeats_order(loader: DataLoader[Any]) -> bool:
    """Return whether a pass over ``loader`` that begins with the same random states has the same order."""
    batch_sampler: Any = loader.batch_sampler
    found = batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler or loader.sampler
    if type(found) is RandomSampler and found.generator is not None:
        # Later items are drawn later, when the program may have drawn numbers of its own from this generator.
        return not found.replacement and found.num_samples <= len(found.data_source)
    return type(found) in _SAMPLERS or getattr(found, "lagom_common", False)


_waiting: list[tuple[Any, LoaderPosition]] = []
"""Iterators of the snapshot that is being read, which are begun when all else is there."""


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _begin_later(iterator: Any, position: LoaderPosition) -> None:
    _waiting.append((iterator, position))


def forget_iterators() -> None:
    """Forget iterators of a snapshot that could not be read."""
    _waiting.clear()


class Rank(Protocol):
    """The rank on which iterators begin again; ``LoaderPasses`` implements this."""

    @property
    def takes_notes(self) -> bool: ...
    def agree(self, mine: bool) -> bool: ...
    def made_batch(self) -> None: ...


def begin_iterators(rank: Rank) -> list[Any]:
    """Begin again all iterators of the snapshot that was read; return their unfinished passes.

    Raises:
        SnapshotError: if a data set does not give what it gave before.
    """
    waiting, passes = list(_waiting), list[Any]()
    _waiting.clear()
    for iterator, position in waiting:
        now = position.start.now()
        _begin(iterator, position, rank)
        if rank.takes_notes and position.loader.num_workers:
            note_workers(iterator, position.workers)
        _prime(iterator, position)
        now.restore()
        if not position.ended:
            passes.append(vars(iterator)["_lagom_pass"])
    return passes


def _begin(iterator: Any, position: LoaderPosition, rank: Rank) -> None:
    loader, taken = position.loader, position.taken
    if not position.loader.num_workers or is_stream(loader):
        samplers = _make(iterator, position)
        if is_stream(loader):
            _read_again(iterator, position)
        elif taken:
            next(itertools.islice(samplers[-1].passes[0], taken - 1, taken), None)
        iterator._num_yielded = taken
    elif not _restart_with_workers(iterator, position, rank, from_start=False):
        iterator._shutdown_workers()
        vars(iterator).clear()
        if not _restart_with_workers(iterator, position, rank, from_start=True):
            raise SnapshotError(f"{type(loader.dataset).__name__} does not repeat what its workers have given before")
    held = vars(iterator)
    current = held["_lagom_pass"]
    current.training, current.by_mode, current.ended = position.training, position.by_mode, position.ended
    current.step = taken if position.training else 0
    held.update({MADE: position.made, PASS_START: position.start})
    if position.first is not None:
        held[FIRST_BATCH] = position.first


def _make(iterator: Any, position: LoaderPosition, *, is_shut: bool = False) -> list[_Skipping]:
    """Make ``iterator``, with the random states with which it was made; return its index samplers."""
    position.made.restore()
    with torch.set_grad_enabled(position.training or position.by_mode), _index_samplers(is_shut=is_shut) as samplers:
        iterator.__init__(position.loader)
    if position.first is not None or position.start is not position.made:
        (position.first or position.start).restore()
    return samplers


def _read_again(iterator: Any, position: LoaderPosition) -> None:
    data, dataset = None, position.loader.dataset
    before = digest(vars(dataset))
    for _ in range(position.taken):
        data = next(iterator)
    if position.taken and (digest(data) != position.last or digest(vars(dataset)) != before):
        raise SnapshotError(f"{type(dataset).__name__} does not repeat what it has given before")


def _restart_with_workers(iterator: Any, position: LoaderPosition, rank: Rank, *, from_start: bool) -> bool:
    """Begin ``iterator`` again, with its workers; return whether no rank found a batch that is not as before.

    Args:
        from_start: whether workers begin at the first batch of the pass; else at their last notes.
    """
    samplers = _make(iterator, position, is_shut=True)
    samplers[-1].is_shut = False
    iterator._sampler_iter = samplers[-1].passes[0]
    iterator._num_yielded = iterator._send_idx = iterator._rcvd_idx = position.taken
    for _ in range(position.taken % iterator._num_workers):
        next(iterator._worker_queue_idx_cycle)
    if position.workers is None:
        return True
    firsts = position.workers.first_tasks(from_start=from_start)
    states = position.workers.ended or [note.state for note in firsts]
    is_same = not any(states) or set_workers(iterator, states)
    if not position.ended:
        checks = [note for notes in position.workers.notes for note in notes]
        is_same &= replay(iterator, firsts, checks, position.taken, rank.made_batch)
    return rank.agree(is_same)


def _prime(iterator: Any, position: LoaderPosition) -> None:
    """Give workers their next batches."""
    if position.loader.num_workers and not is_stream(position.loader) and not position.ended:
        for _ in range(iterator._prefetch_factor * iterator._num_workers):
            iterator._try_put_index()


class _Skipping:
    """An index sampler that gives access to its last pass, so that batches of the pass can be skipped."""

    def __init__(self, source: Any, is_shut: bool) -> None:
        self._source, self.is_shut = source, is_shut
        self.passes: list[Iterator[Any]] = []

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = iter(self._source)
        self.passes = [found]
        return iter(()) if self.is_shut else found


@contextmanager
def _index_samplers(*, is_shut: bool) -> Iterator[list[_Skipping]]:
    """Have iterators of loaders that are made in the block leave their index samplers in a list.

    Args:
        is_shut: whether the index samplers give no batches, so that workers get no tasks yet.
    """
    original, made = vars(DataLoader)["_index_sampler"].fget, list[_Skipping]()

    def index_sampler(loader: DataLoader[Any]) -> Any:
        made.append(_Skipping(original(loader), is_shut))
        return made[-1]

    with replaced(DataLoader, "_index_sampler", property(index_sampler)):
        yield made
