"""``timed_forwards``: records outermost forwards; inner ones cost nothing more."""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lagom.monitor.spans import FORWARD
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.monitor.spans import Spans


class Inside(Protocol):
    """Knows whether a forward is under way."""

    inside: bool


@contextmanager
def timed_forwards(spans: Spans) -> Iterator[None]:
    """Record outermost forwards, when no other patch of lagom wraps them."""
    original, state = vars(nn.Module)["__call__"], _State()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state.inside = True
        try:
            return original(module, *args, **kwargs)
        finally:
            state.inside = False

    with replaced(nn.Module, "__call__", timed_forward(spans, original, call, state)):
        yield


class _State:
    inside = False


def timed_forward(
    spans: Spans, original: Callable[..., Any], call: Callable[..., Any], state: Inside
) -> Callable[..., Any]:
    """Return ``call``, recorded, for outermost forwards; inner ones run ``original`` at once."""
    clock, append, compiles = spans.clock, spans.append, torch.compiler.is_dynamo_compiling

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.inside or compiles():
            return original(module, *args, **kwargs)
        start = clock()
        try:
            return call(module, *args, **kwargs)
        finally:
            if spans.keeps:
                append((FORWARD, type(module).__name__, start, clock(), get_ident()))

    return forward
