"""Passes over data loaders cut short, for a rehearsal: a loader's first batches and its last."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lagom.patching.pinned import pinned_randomness
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.patching.session import Session
    from lagom.plan import Rehearsal

_LONGEST = 1_000_000
"""Batches that are gone through for the last one, so that a sampler without end is no end of the rehearsal."""


@contextmanager
def cut_short(session: Session) -> Iterator[None]:
    """Have every pass over a loader end after a few batches; entered before loaders are dealt out."""
    rehearsal = session.plan.rehearsal
    assert rehearsal is not None
    original = vars(DataLoader)["_index_sampler"].fget

    def index_sampler(loader: DataLoader[Any]) -> Any:
        return _Cut(original(loader), rehearsal, session.world_size) if session.live else original(loader)

    with ExitStack() as stack:
        stack.enter_context(replaced(DataLoader, "_index_sampler", property(index_sampler)))
        if rehearsal.pinned:
            stack.enter_context(pinned_randomness(session))
        yield


class _Cut:
    """Stands for a loader's batch sampler, or its sampler: its first batches and its last."""

    def __init__(self, source: Any, rehearsal: Rehearsal, world_size: int) -> None:
        self._source = source
        self._most = rehearsal.num_batches
        self._group = rehearsal.group_size
        # One rank alone stands for all: it gets the batches of a group as one.
        self._joins = rehearsal.group_size > 1 and world_size == 1

    def __len__(self) -> int:
        groups = min(-(-len(self._source) // self._group), self._most)
        return groups if self._joins else min(len(self._source), groups * self._group)

    def __iter__(self) -> Iterator[Any]:
        for group in self._groups():
            if self._joins and not isinstance(group[0], int):
                yield list(chain.from_iterable(group))
            else:
                yield from group

    def _groups(self) -> Iterator[list[Any]]:
        batches = iter(self._source)
        for _ in range(self._most - 1):
            group = list(islice(batches, self._group))
            if not group:
                return
            yield group
        try:
            known = len(self._source) <= _LONGEST
        except TypeError:
            known = False
        last = list(islice(batches, self._group))
        while known and (following := list(islice(batches, self._group))):
            last = following
        if last:
            yield last
