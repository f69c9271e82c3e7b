"""The order of samples: rank 0's, on all ranks."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lagom.errors import LagomError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.data import DataLoader

    from lagom.patching.session import Session

_OWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_MADE_AHEAD: tuple[type, ...] = tuple(type(iter(kind())) for kind in (list, tuple, dict, set))
_AHEAD = 64


def common_order(session: Session, source: Any) -> Iterator[Any]:
    """Iterate over ``source``, a sampler or a batch sampler, in the order that rank 0 draws.

    torch's own samplers draw from generators that are equal on all ranks; the orders of others travel.
    """
    if type(source) in _OWN or (type(source) is BatchSampler and type(source.sampler) in _OWN):
        return iter(source)
    if getattr(source, "lagom_common", False):
        return _same(session, source)
    if type(source) is BatchSampler:
        following = _Following(session, source.sampler, source.batch_size, eager=False)
        return iter(BatchSampler(following, source.batch_size, source.drop_last))
    return _Following(session, source, 1, eager=True)


def synchronise(session: Session, loader: DataLoader[Any], *, own_order: bool = False) -> None:
    """Set the generators that torch's samplers use to the states they have on rank 0; a collective.

    With ``own_order`` only the global one: the data set shards itself, and its order is its own.
    """
    assert session.group is not None
    session.at("the start of a pass over a data loader")
    generators = {id(torch.default_generator): torch.default_generator}
    sampler = getattr(loader.batch_sampler, "sampler", None) or loader.sampler
    for holder in () if own_order else (loader, loader.sampler, loader.batch_sampler, sampler):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            generators[id(generator)] = generator
    states = [generator.get_state() for generator in generators.values()]
    together = torch.cat(states)
    session.group.broadcast(together)
    parts = torch.split(together, [len(state) for state in states])
    for generator, state in zip(generators.values(), parts, strict=True):
        generator.set_state(state.clone())


def _same(session: Session, source: Any) -> Iterator[Any]:
    """What ``source`` yields, which is the same on all ranks: made sure of once, not batch by batch."""
    items = iter(source)
    session.at(f"a pass over the data set {items.fingerprint}")
    yield from items


class _Following:
    """Yields what rank 0's sampler yields. The others draw as well, for the sake of what their samplers remember.

    One item at a time, since a sampler may look at the training so far; ahead only from what has been drawn.
    """

    def __init__(self, session: Session, source: Iterable[Any], step: int, *, eager: bool) -> None:
        self._session = session
        self._source = source
        self._step = step
        self._mine: Iterator[Any] | None = None
        self._failure: Exception | None = None
        self._items: deque[Any] = deque()
        self._end: Exception | None = None
        if eager:
            self._start()

    def __iter__(self) -> _Following:
        return self

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # as in torch: a TypeError where there is none

    def __next__(self) -> Any:
        if not self._items and self._end is None:
            self._fetch()
        if self._items:
            return self._items.popleft()
        assert self._end is not None
        end, self._end = self._end, StopIteration()  # as from a generator that raised
        raise end

    def _start(self) -> None:
        try:
            self._mine = iter(self._source)
        except Exception as error:  # the user's; rank 0's is raised on all ranks
            self._failure = error

    def _fetch(self) -> None:
        group = self._session.group
        assert group is not None
        if self._mine is None and self._failure is None:
            self._start()
        self._session.at("the next batch of a sampler")
        if group.rank == 0:
            ahead = self._step * (_AHEAD if isinstance(self._mine, _MADE_AHEAD) else 1)
            items, end = self._draw(ahead)
            group.broadcast_bytes(_pack(items, end))
        else:
            items, end, states = pickle.loads(group.broadcast_bytes(b""))
            self._draw(len(items) + (end is not None))
            _set_states(states)
        self._items.extend(items)
        self._end = end

    def _draw(self, count: int) -> tuple[list[Any], Exception | None]:
        items: list[Any] = []
        if self._mine is None:
            return items, self._failure
        try:
            for _ in range(count):
                items.append(next(self._mine))  # noqa: PERF401  # what came before a failure counts
        except Exception as error:  # StopIteration, or the user's
            return items, error
        return items, None


def _pack(items: list[Any], end: Exception | None) -> bytes:
    try:
        return pickle.dumps((items, end, _states()))
    except Exception:
        if end is None:
            raise
        return pickle.dumps((items, LagomError(f"the sampler raised on rank 0: {end!r}"), _states()))


def _states() -> tuple[Any, Any, Any]:
    import_numpy = "numpy.random" in sys.modules
    numpy_state = sys.modules["numpy.random"].get_state() if import_numpy else None
    return torch.default_generator.get_state(), random.getstate(), numpy_state


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    if states[2] is not None and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(states[2])
