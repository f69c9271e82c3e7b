"""Sample order, also of custom samplers: all ranks follow the order that rank 0's sampler draws.

``batch_shares.py`` asks for this order, and takes this rank's share of each batch in passes that are split.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import random
import sys
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lagom.errors import DivergenceError, LagomError
from lagom.exchange.agreement_exchange import signature
from lagom.exchange.plain_values import decode_value, encode_value
from lagom.run_state.random_streams import DRAWING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.utils.data import DataLoader

    from lagom.batches.reading_threads import Result
    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

_TORCH_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_MADE_AHEAD: tuple[type, ...] = tuple(type(iter(kind())) for kind in (list, tuple, dict, set))
_NUM_AHEAD = 64


def iterate_in_common_order(session: Session, source: Any, current: LoaderPass) -> Iterator[Any]:
    """Iterate over ``source``, a sampler or a batch sampler, in the order that rank 0 draws in the pass ``current``.

    In the main thread, torch's own samplers draw from generators that are equal on all ranks. A sampler with the
    attribute ``lagom_common`` has the same order on all ranks by itself. Rank 0 sends the order of any other sampler.
    """
    if type(source) in _TORCH_SAMPLERS or (type(source) is BatchSampler and type(source.sampler) in _TORCH_SAMPLERS):
        return _yield_from_torch_sampler(session, source, current)
    if getattr(source, "lagom_common", False):
        return _yield_from_equal_sampler(session, source, current)
    if type(source) is BatchSampler:
        following = RankZeroOrder(session, source.sampler, source.batch_size, current, eager=False)
        return iter(BatchSampler(following, source.batch_size, source.drop_last))
    following = RankZeroOrder(session, source, 1, current, eager=True)
    return keep_state(following, following.mine)


def has_state(source: Any) -> bool:
    """Return whether ``source`` can save its position and continue from it, as torchdata's samplers can."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def keep_state(items: Iterator[Any], source: Any) -> Iterator[Any]:
    """Return ``items``, an iterator derived from ``source``; add the state methods of ``source`` if it has them."""
    return _StatefulIterator(items, source) if has_state(source) else items


class _StatefulIterator:
    def __init__(self, items: Iterator[Any], source: Any) -> None:
        self._items = items
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def state_dict(self) -> Any:
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._source.load_state_dict(state)


def synchronise_generators(session: Session, loader: DataLoader[Any], *, own_order: bool = False) -> None:
    """Set the global CPU generators, and those of the loader and its samplers, to rank 0's states; a collective.

    With ``own_order`` only the global generators are set: the data set shards itself, and each rank has its own order.

    Raises:
        DivergenceError: on all ranks, if they are at different places of the program.
    """
    assert session.group is not None
    session.check_place("the start of a pass over a data loader")
    # Another library's loader (fastai's) may be read by torch's iterator and have no samplers.
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    found = (
        [] if own_order else [getattr(holder, "generator", None) for holder in (loader, sampler, batch_sampler, inner)]
    )
    generators = [one for one in found if isinstance(one, torch.Generator) and one.device.type == "cpu"]
    with DRAWING:  # a thread that reads a loader may have swapped in this rank's own streams
        mine = encode_value([_generator_states(), [generator.get_state() for generator in generators]])
    rank_0s = session.group.broadcast_bytes(mine)
    if rank_0s != mine:
        common, states = decode_value(rank_0s)
        with DRAWING:
            _set_generator_states(common)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _yield_from_torch_sampler(session: Session, source: Any, current: LoaderPass) -> Iterator[Any]:
    """Yield from one of torch's samplers; in a thread, draw from the pass's generator, or follow rank 0's draws."""
    is_sequential = type(getattr(source, "sampler", source)) is SequentialSampler
    if is_sequential or session.may_meet:
        yield from source
    elif current.generator is not None:
        yield from _copy_with_generator(source, current.generator)
    else:
        yield from RankZeroOrder(session, source, 1, current, eager=False)


def _copy_with_generator(source: Any, generator: torch.Generator) -> Any:
    """Return a copy of a torch sampler that draws from ``generator``, unless it has a generator of its own."""
    found = copy.copy(source)
    if type(source) is BatchSampler:
        found.sampler = _copy_with_generator(source.sampler, generator)
    elif source.generator is None:
        found.generator = generator
    return found


def _yield_from_equal_sampler(session: Session, source: Any, current: LoaderPass) -> Iterator[Any]:
    """Yield from ``source``, whose order is equal on all ranks; ranks compare its fingerprint once for each pass."""
    items = iter(source)
    place = f"a pass over the data set {items.fingerprint}"
    if session.may_meet:
        session.check_place(place)
    elif current.publication().agree(place.encode()) != place.encode():
        raise DivergenceError(f"a thread of rank {session.rank} is at {place}, and the same one of rank 0 at another")
    yield from items


class RankZeroOrder:
    """Yields the items of rank 0's sampler. Other ranks draw too, since their samplers may remember their draws.

    Only the items of one batch (``step``) are drawn at a time, since a sampler may depend on the losses so far; from a
    list, tuple, dict or set, the items of 64 batches. With ``eager``, ``iter(source)`` is called at once, else with the
    first item.
    """

    def __init__(self, session: Session, source: Iterable[Any], step: int, current: LoaderPass, *, eager: bool) -> None:
        self._session = session
        self._current = current
        self._source = source
        self._step = step
        self.mine: Iterator[Any] | None = None
        """This rank's own iterator over the source."""
        self._failure: Exception | None = None
        self._items: deque[Any] = deque()
        self._end: Exception | None = None
        if eager:
            self._start_source()

    def __iter__(self) -> RankZeroOrder:
        return self

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # as in torch: a TypeError where there is none

    def __next__(self) -> Any:
        if not self._items and self._end is None:
            self._fetch_items()
        if self._items:
            return self._items.popleft()
        assert self._end is not None
        end, self._end = self._end, StopIteration()  # as a generator does after it has raised
        raise end

    def _start_source(self) -> None:
        try:
            self.mine = iter(self._source)
        except Exception as error:  # from the user's code; all ranks raise rank 0's error
            self._failure = error

    def _fetch_items(self) -> None:
        session, meets = self._session, self._session.may_meet
        if self.mine is None and self._failure is None:
            self._call_exclusively(self._start_source)
        if meets:
            self._check_order()
        if session.rank == 0:
            ahead = self._step * (_NUM_AHEAD if isinstance(self.mine, _MADE_AHEAD) else 1)
            items, end = self._call_exclusively(self._draw_items, ahead)
            try:
                message = _encode_items(items, end, meets)
            except TypeError as error:
                items, end = [], LagomError(_NOT_PLAIN.format(error=error))
                message = _encode_items(items, end, meets)
            self._send(message, meets=meets)
        else:
            items, described, states = decode_value(self._receive(meets=meets))
            drawn, mine = self._call_exclusively(self._draw_items, len(items) + (described is not None))
            session.has_other_order |= meets and _is_split(session, self._current) and _are_different(drawn, items)
            end = _rebuild_error(described, mine) if described is not None else None
            if states is not None:
                with DRAWING:
                    _set_generator_states(states)
        self._items.extend(items)
        self._end = end

    def _check_order(self) -> None:
        """Check that all ranks are at the next batch; warn if a rank's sampler would have drawn another order."""
        session = self._session
        assert session.group is not None
        assert session.backwards.divergence is not None
        place = "the next batch of a sampler"
        alike, otherwise = (signature(text.encode()) for text in (place, f"{place}, in another order"))
        tells = session.has_other_order and _is_split(session, self._current)
        rows = session.group.exchange(otherwise if tells else alike)
        if any(row not in (alike, otherwise) for row in rows):
            session.backwards.divergence.find_divergence(place)
        elif otherwise in rows:
            session.has_other_order = False
            session.say_once(_OTHER_ORDER.format(kind=type(self._source).__name__))

    def _send(self, message: bytes, *, meets: bool) -> None:
        if not meets:
            self._current.publication().publish(message)
            return
        assert self._session.group is not None
        self._session.group.broadcast_bytes(message)

    def _receive(self, *, meets: bool) -> bytes:
        if not meets:
            return self._current.publication().read()
        assert self._session.group is not None
        return self._session.group.broadcast_bytes(b"")

    def _call_exclusively(self, call: Callable[..., Result], *args: object) -> Result:
        """Run ``call``, which draws from the common random streams, with ``DRAWING`` held."""
        readers = self._current.readers
        with DRAWING:
            # With workers, the first batches are drawn outside of the loader calls that ``readers`` watches. So
            # ``readers`` must watch this call too.
            return readers.read(call, *args) if self._session.is_in_thread and readers is not None else call(*args)

    def _draw_items(self, count: int) -> tuple[list[Any], Exception | None]:
        items: list[Any] = []
        if self.mine is None:
            return items, self._failure
        try:
            for _ in range(count):
                items.append(next(self.mine))  # noqa: PERF401  # keeps the items before a failure
        except Exception as error:  # StopIteration, or an error of the user's code
            return items, error
        return items, None


def _are_different(drawn: list[Any], items: list[Any]) -> bool:
    with contextlib.suppress(TypeError):  # values that cannot be sent are not compared
        return encode_value(drawn) != encode_value(items)
    return False


def _is_split(session: Session, current: LoaderPass) -> bool:
    return session.config.batches != "whole" and current.training and current.is_split


_OTHER_ORDER = (
    "the order of {kind} is rank 0's; other ranks would have drawn another. That is right where it is random. Where it "
    "follows what the loop has seen (losses, scores), it follows rank 0's share of that, with batches='split'; with "
    "batches='whole' all ranks see all of it"
)


def _encode_items(items: list[Any], end: Exception | None, with_states: bool) -> bytes:
    with DRAWING:
        states = _generator_states() if with_states else None
    return encode_value([items, _describe_error(end) if end is not None else None, states])


def _describe_error(error: Exception) -> list[str]:
    """Describe ``error`` by the name of its class, its text, and its class's module."""
    return [type(error).__name__, str(error.args[0]) if len(error.args) == 1 else str(error), type(error).__module__]


def _rebuild_error(described: list[str], mine: Exception | None) -> Exception:
    """Rebuild the error that rank 0 described, as one of Python's own classes, else as ``mine`` or a LagomError.

    Args:
        mine: error that the same code raised on this rank, or None; returned if its class is the described one.
    """
    name, text, module = described
    kind = getattr(builtins, name, None) if module == "builtins" else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError takes more arguments
            return kind(text)
    if mine is not None and (type(mine).__name__, type(mine).__module__) == (name, module):
        return mine
    if (name, module) == (LagomError.__name__, LagomError.__module__):
        return LagomError(text)
    return LagomError(f"the sampler of a data loader raised {name} on rank 0: {text}")


def _generator_states() -> list[Any]:
    version, numbers, gauss = random.getstate()
    found: list[Any] = [torch.default_generator.get_state(), version, array("I", numbers).tobytes(), gauss]
    return found + (list(sys.modules["numpy.random"].get_state()) if "numpy.random" in sys.modules else [])


def _set_generator_states(states: list[Any]) -> None:
    torchs, version, numbers, gauss, *numpys = states
    torch.default_generator.set_state(torchs)
    random.setstate((version, tuple(array("I", numbers)), gauss))
    if numpys and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(tuple(numpys))


_NOT_PLAIN = (
    "all ranks follow the sampler of rank 0, but {error}; have it yield numbers, texts, tensors, arrays, "
    "or lists, tuples and dicts of them"
)
