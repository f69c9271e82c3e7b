"""Exchanges between ranks, timed: lagom's own, and those of programs that are distributed already."""

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
from lagom.collectives.aside import Done
from lagom.collectives.process_group import SharedProcessGroup, listed
from lagom.monitor.spans import COLLECTIVE
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.collectives.group import Group
    from lagom.monitor.spans import Spans

RANKS, ASIDE = "ranks", "aside"
"""Streams of lagom's own exchanges."""
_MOST = 1000
"""Exchanges under way that are remembered."""
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


class _Timed:
    """Calls of the program's own thread."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.size = 0

    def call(self, name: str, size: int, stream: str, function: Callable[[], Any]) -> Any:
        """What ``function`` gives, which exchanges ``size`` bytes."""
        spans = self.spans
        number = spans.next_number(stream) if stream else -1
        start = spans.clock()
        if get_ident() != spans.thread:
            try:
                return function()
            finally:
                spans.add(COLLECTIVE, name, start, size, stream, number)
        before, spans.inner = spans.inner, 0
        try:
            return function()
        finally:
            spans.end(COLLECTIVE, name, start, before, size, stream, number)


@contextmanager
def timed_group(group: Group, spans: Spans) -> Iterator[None]:
    """Note the exchanges of ``group``."""
    timed = _Timed(spans)
    with ExitStack() as stack:
        for name in ("broadcast", "all_gather", "all_gather_into", "barrier"):
            stack.enter_context(replaced(group, name, _of_tensors(timed, name, getattr(group, name))))
        stack.enter_context(replaced(group, "_exchange", _exchanging(timed, group._exchange)))
        stack.enter_context(replaced(group, "_agreed", _agreeing(timed, group._agreed)))
        for name in ("averaging", "averaging_in_place"):
            stack.enter_context(replaced(group, name, _averaging(timed, getattr(group, name))))
        later = _Later(timed, group)
        stack.enter_context(replaced(group, "all_reduce_later", later.begin(group.all_reduce_later, RANKS)))
        stack.enter_context(replaced(group, "all_reduce_aside", later.begin(group.all_reduce_aside, ASIDE)))
        stack.enter_context(replaced(group, "wait", later.wait(group.wait)))
        stack.enter_context(replaced(groups, "_sum", _aside(timed, groups._sum)))
        yield


def _of_tensors(timed: _Timed, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(*args: Any, **options: Any) -> Any:
        size = args[0].nbytes if args else 0
        return timed.call(name, size, RANKS, lambda: original(*args, **options))

    return exchange


def _exchanging(timed: _Timed, original: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(head: bytes, body: memoryview | None = None) -> Any:
        size = len(head) + (0 if body is None else len(body))
        return timed.call("exchange", size, RANKS, lambda: original(head, body))

    return exchange


def _agreeing(timed: _Timed, original: Callable[..., bool]) -> Callable[..., bool]:
    def agreed(rows: Callable[[], Any], average: Callable[[], bool]) -> bool:
        size = timed.size
        # Each by itself: others may ask for something else in between.
        return original(rows, lambda: timed.call("average", size, RANKS, average))

    return agreed


def _averaging(timed: _Timed, original: Callable[..., Any]) -> Callable[..., Any]:
    def averaging(given: Any, sections: Any) -> Any:
        average = original(given, sections)
        if average is None:
            return None
        size = given if isinstance(given, int) else given.nbytes

        def sized(*args: Any) -> Any:
            timed.size = size
            return average(*args)

        return sized

    return averaging


def _aside(timed: _Timed, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def total(near: Any, tensor: Any) -> None:
        timed.call("all_reduce", tensor.nbytes, ASIDE, lambda: original(near, tensor))

    return total


class _Later:
    """Exchanges that go on while the program does."""

    def __init__(self, timed: _Timed, group: Group) -> None:
        self._timed = timed
        self._group = group
        self._begun: dict[int, tuple[Any, int, int, str, int]] = {}

    def begin(self, original: Callable[[Any], Any], stream: str) -> Callable[[Any], Any]:
        """``original``, which begins one in ``stream``."""
        spans, group = self._timed.spans, self._group

        def later(tensor: Any) -> Any:
            if stream == ASIDE and group._thread is not None and group._near_aside is not None:
                return original(tensor)  # its thread notes what it does
            size, number = tensor.nbytes, spans.next_number(stream)
            start = spans.clock()
            before, spans.inner = spans.inner, 0
            work = original(tensor)
            if type(work) is Done:
                spans.end(COLLECTIVE, "all_reduce", start, before, size, stream, number)
                return work
            spans.spend(COLLECTIVE, start, before)
            if len(self._begun) == _MOST:
                self._begun.clear()  # of backwards that failed, as a rule
            self._begun[id(work)] = work, start, size, stream, number
            return work

        return later

    def wait(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """``original``, which waits for one."""
        spans = self._timed.spans

        def wait(work: Any) -> None:
            if type(work) is Done:
                return
            _, begun, size, stream, number = self._begun.pop(id(work), (None, 0, 0, "", -1))
            start = spans.clock()
            before, spans.inner = spans.inner, 0
            try:
                original(work)
            finally:
                spans.spend(COLLECTIVE, start, before)
                if begun:
                    spans.add(COLLECTIVE, "all_reduce", begun, size, stream, number)

        return wait


@contextmanager
def timed_collectives(spans: Spans) -> Iterator[None]:
    """Note what programs that are distributed already exchange: by ``torch.distributed``, and by lagom's backend."""
    timed = _Timed(spans)
    with ExitStack() as stack:
        collective = _in_group(timed, vars(SharedProcessGroup)["_collective"])
        stack.enter_context(replaced(SharedProcessGroup, "_collective", collective))
        originals = {name: getattr(distributed_c10d, name) for name in _CALLS}
        ours = {name: _called(timed, name, original) for name, original in originals.items()}
        for module in list(sys.modules.values()):
            known = getattr(module, "__dict__", None)
            if not isinstance(known, dict):
                continue
            for name, original in originals.items():
                # Also modules that imported it by its name.
                if known.get(name) is original:
                    stack.enter_context(replaced(module, name, ours[name]))
        yield


def _in_group(timed: _Timed, original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(self: Any, run: Callable[[], object], opts: Any, result: Any) -> Any:
        # The method that made it.
        name = getattr(run, "__qualname__", "").partition(".<locals>")[0].rpartition(".")[2]
        size = sum(one.nbytes for one in result)
        stream = _stream(self)
        return original(self, lambda: timed.call(name, size, stream, run), opts, result)

    return collective


def _called(timed: _Timed, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
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
        return timed.call(shown, size, stream, lambda: original(*args, **options))

    return call


def _stream(group: Any) -> str:
    try:
        return f"group {group.group_name}"
    except Exception:  # one that torch does not know
        return ""
