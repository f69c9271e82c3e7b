"""Records exchanges between ranks: lagom's own, and those of distributed programs."""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lagom.collectives import group as groups
from lagom.collectives.background import Done
from lagom.collectives.torch_backend.arguments import listed
from lagom.collectives.torch_backend.shared_group import SharedProcessGroup
from lagom.monitor.spans import ASYNCHRONOUS, COLLECTIVE
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.collectives.group import Group
    from lagom.monitor.spans import Spans

RANKS, ASIDE = "ranks", "aside"
"""Streams of lagom's own exchanges."""
_MOST = 1000
"""Most exchanges under way that are remembered."""
_CALLS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
)


def _timed(spans: Spans, name: str, size: int, stream: str, function: Callable[[], Any]) -> Any:
    """Run ``function``, which exchanges ``size`` bytes, and record it."""
    number = spans.numbers(stream)() if stream else -1
    start = spans.clock()
    try:
        return function()
    finally:
        if spans.keeps:
            spans.append((COLLECTIVE, name, start, spans.clock(), get_ident(), size, stream, number))


@contextmanager
def time_group(group: Group, spans: Spans) -> Iterator[None]:
    """Record the exchanges of ``group``."""
    with ExitStack() as stack:
        for name in ("broadcast", "all_gather", "all_gather_into", "all_to_all", "barrier"):
            stack.enter_context(replaced(group, name, _of_tensors(spans, name, getattr(group, name))))
        stack.enter_context(replaced(group, "_exchange", _exchanging(spans, group._exchange)))
        averages = _Averages(spans)
        stack.enter_context(replaced(group, "_served", averages.served(group._served)))
        stack.enter_context(replaced(group, "averaging", averages.averaging(group.averaging)))
        later = _Later(spans, group)
        stack.enter_context(replaced(group, "all_reduce_later", later.begin(group.all_reduce_later, RANKS)))
        stack.enter_context(replaced(group, "all_reduce_aside", later.begin(group.all_reduce_aside, ASIDE)))
        stack.enter_context(replaced(group, "wait", later.wait(group.wait)))
        stack.enter_context(replaced(groups, "_sum", _aside(spans, groups._sum)))
        yield


def _of_tensors(spans: Spans, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(*args: Any, **options: Any) -> Any:
        size = args[0].nbytes if args else 0
        return _timed(spans, name, size, RANKS, lambda: original(*args, **options))

    return exchange


def _exchanging(spans: Spans, original: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(head: bytes, body: memoryview | None = None) -> Any:
        size = len(head) + (0 if body is None else len(body))
        return _timed(spans, "exchange", size, RANKS, lambda: original(head, body))

    return exchange


class _Averages:
    """Records averages of small gradients, one in each step of most programs, at the least cost."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._start = 0
        """Start of the exchange under way."""
        self._number = -1

    def averaging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``original``, which makes a function that averages."""
        spans, clock, append = self._spans, self._spans.clock, self._spans.append
        number = spans.numbers(RANKS)

        def averaging(size: int, sections: Any) -> Any:
            average = original(size, sections)
            if average is None:
                return None

            def timed(*args: Any) -> Any:
                self._number = number()
                self._start = clock()
                try:
                    return average(*args)
                finally:
                    if self._start and spans.keeps:
                        append((COLLECTIVE, "average", self._start, clock(), get_ident(), size, RANKS, self._number))
                    self._start = 0

            return timed

        return averaging

    def served(self, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Wrap ``original``: an average that turned out to be another rank's request begins again after it."""
        spans = self._spans

        def served(rows: Any) -> bool:
            within, self._start = self._start, 0
            if within:
                spans.add(COLLECTIVE, "average", within, stream=RANKS, number=self._number)
            again = original(rows)
            if within and again:
                self._number, self._start = spans.numbers(RANKS)(), spans.clock()
            return again

        return served


def _aside(spans: Spans, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def total(near: Any, tensor: Any) -> None:
        _timed(spans, "all_reduce", tensor.nbytes, ASIDE, lambda: original(near, tensor))

    return total


class _Later:
    """Records exchanges that go on while the program computes."""

    def __init__(self, spans: Spans, group: Group) -> None:
        self._spans = spans
        self._group = group
        self._begun: dict[int, tuple[Any, int, int, str, int]] = {}

    def begin(self, original: Callable[[Any], Any], stream: str) -> Callable[[Any], Any]:
        """Wrap ``original``, which begins an exchange in ``stream``."""
        spans, group = self._spans, self._group

        def later(tensor: Any) -> Any:
            if stream == ASIDE and group._thread is not None and group.reduces_parts:
                return original(tensor)  # its thread records it
            size, number = tensor.nbytes, spans.numbers(stream)()
            start = spans.clock()
            work = original(tensor)
            if type(work) is Done:
                spans.add(COLLECTIVE, "all_reduce", start, size, stream, number)
                return work
            spans.add(COLLECTIVE, "all_reduce begins", start, size)
            if len(self._begun) == _MOST:
                self._begun.clear()  # usually of backwards that failed
            self._begun[id(work)] = work, start, size, stream, number
            return work

        return later

    def wait(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap ``original``, which waits for an exchange."""
        spans = self._spans

        def wait(work: Any) -> None:
            if type(work) is Done:
                return
            begun = self._begun.pop(id(work), None)
            start = spans.clock()
            try:
                original(work)
            finally:
                spans.add(COLLECTIVE, "wait", start)
                if begun is not None:
                    _, begin, size, stream, number = begun
                    spans.add(ASYNCHRONOUS, "all_reduce", begin, size, stream, number)

        return wait


@contextmanager
def timed_collectives(spans: Spans) -> Iterator[None]:
    """Record the exchanges of distributed programs: by ``torch.distributed``, and by lagom's backend."""
    with ExitStack() as stack:
        collective = _in_group(spans, vars(SharedProcessGroup)["_collective"])
        stack.enter_context(replaced(SharedProcessGroup, "_collective", collective))
        originals = {name: getattr(distributed_c10d, name) for name in _CALLS}
        ours = {name: _called(spans, name, original) for name, original in originals.items()}
        for module in list(sys.modules.values()):
            known = getattr(module, "__dict__", None)
            if not isinstance(known, dict):
                continue
            for name, original in originals.items():
                # Also modules that imported the function by its name.
                if known.get(name) is original:
                    stack.enter_context(replaced(module, name, ours[name]))
        yield


def _in_group(spans: Spans, original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(self: Any, run: Callable[[], object], opts: Any, result: Any) -> Any:
        # The name of the method that made it.
        name = getattr(run, "__qualname__", "").partition(".<locals>")[0].rpartition(".")[2]
        size = sum(one.nbytes for one in result)
        stream = _stream(self)
        return original(self, lambda: _timed(spans, name, size, stream, run), opts, result)

    return collective


def _called(spans: Spans, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    is_message = name in ("send", "recv", "isend", "irecv")

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        group = options.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
        group = group if group is not None else dist.group.WORLD
        if group is None or isinstance(group, SharedProcessGroup):
            return original(*args, **options)
        given = [one for one in (*args, *options.values()) if isinstance(one, (list, torch.Tensor))][-1:]
        size = sum(one.nbytes for one in (listed(given[0]) if given else []) if isinstance(one, torch.Tensor))
        shown = f"{name} (begun)" if options.get("async_op") else name
        stream = "" if is_message else _stream(group)
        return _timed(spans, shown, size, stream, lambda: original(*args, **options))

    return call


def _stream(group: Any) -> str:
    try:
        return f"group {group.group_name}"
    except Exception:  # a group that torch does not know
        return ""
