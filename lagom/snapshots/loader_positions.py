"""Positions of loaders: a pass is begun again with the random states that it began with, and skips what was taken."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.errors import SnapshotError
from lagom.loaders.sample_digest import digest
from lagom.patching.replace import replaced
from lagom.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOADER = "_lagom_loader"
PASS_START, FIRST_BATCH, LAST_BATCH = "_lagom_pass_start", "_lagom_first_batch", "_lagom_last_batch"
"""Of an iterator: generators' states when it was made and when its first batch was asked for; its last batch."""
_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw random numbers at their first item only, and do not change."""


@dataclass(slots=True)
class PassStart:
    """States of the generators that a pass over a loader may draw from, at its beginning."""

    common: Mapping[str, Any]
    own: Sequence[tuple[torch.Generator, torch.Tensor]]

    def restore(self) -> None:
        """Set the generators to these states."""
        set_random_states(self.common)
        for generator, state in self.own:
            generator.set_state(state)


def pass_start(loader: DataLoader[Any]) -> PassStart:
    """Return the states of the generators of ``loader`` and its samplers now."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {
        id(one): one for holder in holders if isinstance(one := getattr(holder, "generator", None), torch.Generator)
    }
    return PassStart(random_states(), [(one, one.get_state()) for one in found.values()])


def reduce_iterator(iterator: Any) -> Any:
    """Return how to pickle an iterator of a loader: as its position."""
    held = vars(iterator)
    start = held.get(PASS_START)
    loader = held[LOADER]() if start is not None else None
    if loader is None:
        return NotImplemented
    current = held["_lagom_pass"]
    if current.ended:
        return iter, ((),)
    taken = iterator._num_yielded
    if taken and iterator._num_workers:
        raise pickle.PicklingError("a loader with workers is in the middle of a pass")
    if not is_stream(loader) and not _repeats_order(loader):
        raise pickle.PicklingError("a loader with a sampler of the program's own is in a pass")
    last = digest(held[LAST_BATCH]) if taken and is_stream(loader) else b""
    return begin_again, (loader, start, held.get(FIRST_BATCH), taken, current.training, last)


begun: list[Any] = []
"""Passes that go on, of the snapshot that is being read."""


def _repeats_order(loader: DataLoader[Any]) -> bool:
    """Return whether a pass over ``loader`` that begins with the same random states has the same order."""
    batch_sampler: Any = loader.batch_sampler
    found = batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler or loader.sampler
    if type(found) is RandomSampler and found.generator is not None:
        # Later items are drawn later, when the program may have drawn numbers of its own from this generator.
        return not found.replacement and found.num_samples <= len(found.data_source)
    return type(found) in _SAMPLERS or getattr(found, "lagom_common", False)


def begin_again(
    loader: DataLoader[Any], start: PassStart, first: PassStart | None, taken: int, training: bool, last: bytes
) -> Any:
    """Return an iterator of ``loader`` that has given ``taken`` batches of a pass.

    Args:
        start: states when the pass began.
        first: states when its first batch was asked for.
        last: digest of the last batch, if batches are read again.

    Raises:
        SnapshotError: if it was another.
    """
    now, states = random_states(), [generator.get_state() for generator, _ in start.own]
    start.restore()
    with _index_samplers() as samplers:
        iterator = iter(loader)
    if first is not None:
        first.restore()
    if not isinstance(iterator, _BaseDataLoaderIter):
        raise TypeError(f"{type(loader).__name__} has an iterator of its own")
    if is_stream(loader):
        data, before = None, digest(vars(loader.dataset))
        for _ in range(taken):
            data = next(iterator)
        if taken and (digest(data) != last or digest(vars(loader.dataset)) != before):
            raise SnapshotError(f"{type(loader.dataset).__name__} does not repeat what it has given before")
    elif taken:
        indices = samplers[-1].passes[0]
        next(itertools.islice(indices, taken - 1, taken), None)
    iterator._num_yielded = taken
    current = vars(iterator)["_lagom_pass"]
    current.step = taken if training else 0
    vars(iterator).update({PASS_START: start, **({FIRST_BATCH: first} if first is not None else {})})
    begun.append(current)
    set_random_states(now)
    for (generator, _), state in zip(start.own, states, strict=True):
        generator.set_state(state)
    return iterator


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether ``loader`` reads an iterable data set, which has no indices to skip."""
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)


class _Skipping:
    """An index sampler whose passes can skip batches, after the loader's iterator has drawn its own random numbers."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.passes: list[Iterator[Any]] = []

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = iter(self._source)
        self.passes = [found]
        return found


@contextmanager
def _index_samplers() -> Iterator[list[_Skipping]]:
    """Have iterators of loaders that are made in the block leave their index samplers in a list."""
    original, made = vars(DataLoader)["_index_sampler"].fget, list[_Skipping]()

    def index_sampler(loader: DataLoader[Any]) -> Any:
        made.append(_Skipping(original(loader)))
        return made[-1]

    with replaced(DataLoader, "_index_sampler", property(index_sampler)):
        yield made
