"""``resumable_bars``: tqdm's bars, whose iterator can be pickled and goes on where it was."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lagom.patching.replace import replaced

_SHOWN = ("fp", "sp")
"""Attributes that hold the stream, and the function that writes to it."""


class _Source:
    """An iterable that remembers the iterator which the bar has made of it."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable
        self.iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.iterable)
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class BarIterator:
    """The iterator of a tqdm bar; can be pickled, since it keeps the iterator that the bar reads.

    Args:
        run: tqdm's own ``__iter__``.
    """

    def __init__(self, bar: Any, run: Any, source: _Source) -> None:
        self.bar, self._run, self.source = bar, run, source
        self._generator: Any = None

    def __iter__(self) -> BarIterator:
        return self

    def __next__(self) -> Any:
        if self._generator is None:
            before, self.bar.iterable = self.bar.iterable, self.source
            self._generator = self._run(self.bar)
            try:
                return next(self._generator)
            finally:
                self.bar.iterable = before
        return next(self._generator)


@contextmanager
def resumable_bars() -> Iterator[None]:
    """Have bars of tqdm, if it is imported already, give iterators that can be pickled."""
    bars: Any = sys.modules.get("tqdm.std")
    if bars is None:
        yield
        return
    with replaced(bars.tqdm, "__iter__", _make_iter(bars.tqdm.__iter__)):
        yield


def _make_iter(original: Any) -> Any:
    def iterate(bar: Any) -> Any:
        return BarIterator(bar, original, _Source(bar.iterable))

    iterate.lagom_original = original  # type: ignore[attr-defined]
    return iterate


def reduce_bar(value: Any) -> Any:
    """Return how to pickle a bar or its iterator; NotImplemented for other objects."""
    if isinstance(value, BarIterator):
        frame = value._generator.gi_frame if value._generator is not None else None
        number = frame.f_locals.get("n") if frame is not None else None
        return _resumed_iterator, (value.bar, value.source.iterable, value.source.iterator, number)
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None and isinstance(value, bars.tqdm):
        state = {name: one for name, one in vars(value).items() if name not in (*_SHOWN, "iterable")}
        elapsed = time.time() - state["start_t"] if "start_t" in state else None
        return _bar, (type(value), state, elapsed, getattr(getattr(value, "fp", None), "_wrapped", None))
    return NotImplemented


def _bar(kind: Any, state: dict[str, Any], elapsed: float | None, stream: Any) -> Any:
    bars: Any = sys.modules["tqdm.std"]
    bar = kind.__new__(kind)
    vars(bar).update(state)
    bar.iterable = None
    if not bar.disable:
        bar.fp = bars.DisableOnWriteError(stream or sys.stderr, tqdm_instance=bar)
        bar.sp = bar.status_printer(bar.fp)
        bar.start_t = time.time() - (elapsed or 0.0)
        bar.last_print_t = time.time()
    return bar


def _resumed_iterator(bar: Any, iterable: Any, iterator: Any, number: int | None) -> BarIterator:
    iterate: Any = type(bar).__iter__
    original = getattr(iterate, "lagom_original", iterate)
    source = _Source(iterable)
    bar.iterable = iterable
    if number is not None:
        bar.n = number
    if iterator is not None:
        source = _Begun(iterable)
        source.iterator = iterator
    return BarIterator(bar, original, source)


class _Begun(_Source):
    """A source that goes on with an iterator that was begun before."""

    def __iter__(self) -> Iterator[Any]:
        return self
