"""``timed``: records the program's activities, outside all other patches. See Note [Timing]."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.loaders import dataloader
from lagom.monitor import spans as kinds
from lagom.patching.replace import replaced
from lagom.timing.exchange_spans import time_group, timed_collectives
from lagom.timing.forward_spans import timed_forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.monitor.spans import Spans
    from lagom.session.session import Session


@contextmanager
def timed(session: Session, spans: Spans, *, forwards: bool) -> Iterator[None]:
    """Record the program's activities into ``spans``; entered after all other patches.

    Args:
        forwards: whether forwards are recorded already.
    """
    with ExitStack() as stack:
        stack.enter_context(kinds.current(spans))
        if session.group is not None:
            stack.enter_context(time_group(session.group, spans))
        stack.enter_context(timed_collectives(spans))
        stack.enter_context(_timed_loaders(spans))
        if not forwards:
            stack.enter_context(timed_forwards(spans))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", _backward(spans)))
        stack.enter_context(_timed_steps(spans))
        try:
            yield
        finally:
            spans.finish()


@contextmanager
def _timed_loaders(spans: Spans) -> Iterator[None]:
    begin = spans.timed(kinds.DATA, "begin a pass", vars(DataLoader)["__iter__"])
    with ExitStack() as stack:
        stack.enter_context(replaced(DataLoader, "__iter__", begin))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _following(spans)))
        moved = spans.timed(kinds.COPY, "to the device", vars(dataloader)["move_to_device"])
        stack.enter_context(replaced(dataloader, "move_to_device", moved))
        yield


def _following(spans: Spans) -> Callable[[Any], Any]:
    original = vars(_BaseDataLoaderIter)["__next__"]
    clock, append = spans.clock, spans.append

    def following(self: Any) -> Any:
        start = clock()
        try:
            data = original(self)
        finally:
            if spans.keeps:
                append((kinds.DATA, "wait for data", start, clock(), get_ident()))
        spans.batch(start)
        return data

    return following


def _backward(spans: Spans) -> Callable[..., Any]:
    original = torch.autograd._engine_run_backward
    clock, append = spans.clock, spans.append

    def run_backward(outputs: Any, *args: Any, **options: Any) -> Any:
        start = clock()
        accumulates = options.get("accumulate_grad", False)
        if accumulates:
            spans.backward(start)
        try:
            return original(outputs, *args, **options)
        finally:
            if spans.keeps:
                append((kinds.BACKWARD, "backward" if accumulates else "autograd.grad", start, clock(), get_ident()))

    return run_backward


@contextmanager
def _timed_steps(spans: Spans) -> Iterator[None]:
    """Record steps by torch's hooks of all optimizers, which leave nothing on the optimizers."""
    begun: dict[int, int] = {}
    names: dict[type, str] = {}
    clock, append = spans.clock, spans.append

    def begins(optimizer: Any, *_: Any) -> None:
        begun[id(optimizer)] = clock()

    def ends(optimizer: Any, *_: Any) -> None:
        start = begun.pop(id(optimizer), None)
        if start is not None and spans.keeps:
            kind = type(optimizer)
            name = names.get(kind) or names.setdefault(kind, f"{kind.__name__}.step")
            append((kinds.OPTIMIZER, name, start, clock(), get_ident()))

    handles = [
        optimizers.register_optimizer_step_pre_hook(begins),
        optimizers.register_optimizer_step_post_hook(ends),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Note [Timing]
#
# Functions around the existing ones record the spans; they are installed when the run begins. Without a timeline there
# is no cost, not even a check. They also see distributed programs, in which lagom's own patches do nothing.
#
# Times are those of the program's thread. On a GPU the thread mostly launches work: slow work shows where the program
# waits for it, usually in a copy to the host or in an exchange.
