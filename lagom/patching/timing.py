"""``timed``: notes what a program does for how long, from outside of all other patches. See Note [Timing]."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from lagom.monitor import spans as kinds
from lagom.patching import dataloader
from lagom.patching.replace import replaced
from lagom.patching.timing_exchanges import timed_collectives, timed_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.monitor.spans import Spans
    from lagom.patching.session import Session


_KINDS = {_SingleProcessDataLoaderIter: "load", _MultiProcessingDataLoaderIter: "wait for a worker"}


@contextmanager
def timed(session: Session, spans: Spans) -> Iterator[None]:
    """Note what the program does into ``spans``; entered after all other patches."""
    with ExitStack() as stack:
        stack.enter_context(kinds.current(spans))
        if session.group is not None:
            stack.enter_context(timed_group(session.group, spans))
        stack.enter_context(timed_collectives(spans))
        stack.enter_context(_timed_loaders(spans))
        stack.enter_context(replaced(nn.Module, "__call__", _outermost(spans)))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", _backward(spans)))
        stack.enter_context(_timed_steps(spans))
        yield


@contextmanager
def _timed_loaders(spans: Spans) -> Iterator[None]:
    begin = spans.timed(kinds.DATA, "begin a pass", vars(DataLoader)["__iter__"])
    with ExitStack() as stack:
        stack.enter_context(replaced(DataLoader, "__iter__", _method(begin)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _following(spans)))
        for kind, name in _KINDS.items():
            fetch = _noted(spans, name, vars(kind)["_next_data"])
            stack.enter_context(replaced(kind, "_next_data", fetch))
        moved = spans.timed(kinds.COPY, "to the device", vars(dataloader)["moved"])
        stack.enter_context(replaced(dataloader, "moved", moved))
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    # A function of its own, which becomes a method.
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return function(self, *args, **options)

    return method


def _following(spans: Spans) -> Callable[[Any], Any]:
    original = vars(_BaseDataLoaderIter)["__next__"]
    clock = spans.clock

    def following(self: Any) -> Any:
        start = clock()
        before, spans.inner = spans.inner, 0
        try:
            data = original(self)
        finally:
            spans.end(kinds.DATA, "wait for data", start, before)
        spans.batch(start)
        return data

    return following


def _noted(spans: Spans, name: str, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def next_data(self: Any) -> Any:
        start = spans.clock()
        try:
            return original(self)
        finally:
            spans.add(kinds.FETCH, name, start)

    return next_data


def _outermost(spans: Spans) -> Callable[..., Any]:
    original = vars(nn.Module)["__call__"]
    inside = False

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or torch.compiler.is_dynamo_compiling():
            return original(module, *args, **kwargs)
        inside = True
        start = spans.clock()
        before, spans.inner = spans.inner, 0
        try:
            return original(module, *args, **kwargs)
        finally:
            inside = False
            spans.end(kinds.FORWARD, type(module).__name__, start, before)

    return call


def _backward(spans: Spans) -> Callable[..., Any]:
    original = torch.autograd._engine_run_backward

    def run_backward(outputs: Any, *args: Any, **options: Any) -> Any:
        start = spans.clock()
        accumulates = options.get("accumulate_grad", False)
        if accumulates:
            spans.backward(start)
        before, spans.inner = spans.inner, 0
        try:
            return original(outputs, *args, **options)
        finally:
            spans.end(kinds.BACKWARD, "backward" if accumulates else "autograd.grad", start, before)

    return run_backward


@contextmanager
def _timed_steps(spans: Spans) -> Iterator[None]:
    """By torch's hooks of all optimizers, which leave nothing on them."""
    begun: dict[int, tuple[int, int]] = {}

    def begins(optimizer: Any, *_: Any) -> None:
        begun[id(optimizer)] = spans.clock(), spans.inner
        spans.inner = 0

    def ends(optimizer: Any, *_: Any) -> None:
        start, before = begun.pop(id(optimizer), (0, 0))
        if start:
            spans.end(kinds.OPTIMIZER, f"{type(optimizer).__name__}.step", start, before)

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
# What is noted is noted by functions around those that are there already, put in when the run begins; where no timeline
# is wanted there is nothing, not even a question. So they also see programs that are distributed already, in which
# lagom's own patches do nothing.
#
# Times are those of the program's thread. On a GPU most of what it does is to launch work: what takes long there shows
# where the program waits for it, as a rule in a copy to the host or in an exchange.
