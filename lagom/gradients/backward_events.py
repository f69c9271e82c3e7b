"""``publish_backwards``: the events of backwards in a run of one rank, which averages no gradients."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd

from lagom.patching.replace import replaced
from lagom.run_state.leaves import find_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lagom.session.session import Session


@contextmanager
def publish_backwards(session: Session) -> Iterator[None]:
    """Patch autograd so that outermost backwards are published; see ``Events``.

    With several ranks ``synchronise_backward`` publishes them; it also explains the patch.
    """
    original, events = torch.autograd._engine_run_backward, session.events
    running = set[int]()
    """Threads of the program in which a backward runs."""

    @torch._disable_dynamo  # as in synchronise_backward
    def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        thread = threading.get_ident()
        if not (session.live and options.get("accumulate_grad", False)) or thread in running or _is_of_autograd():
            return original(outputs, *args, **options)
        if (call := events.backward_begun.call) is not None:
            call(find_leaves(outputs, args[3]))
        running.add(thread)
        try:
            result = original(outputs, *args, **options)
        finally:
            running.remove(thread)
        if (call := events.backward_ended.call) is not None:
            call()
        return result

    with replaced(torch.autograd, "_engine_run_backward", run_backward):
        yield


def _is_of_autograd() -> bool:
    """Return whether this is a thread of autograd, in which a checkpoint runs a backward inside another."""
    return isinstance(threading.current_thread(), threading._DummyThread)
