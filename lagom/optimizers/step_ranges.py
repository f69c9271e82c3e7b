"""``skip_profiler_ranges``, ``timed_steps``: what surrounds the steps of optimizers."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import optimizer as optimizers

from lagom.patching.replace import replaced
from lagom.watch.step_clock import OPTIMIZER, OWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.watch.step_clock import StepClock


@contextmanager
def skip_profiler_ranges() -> Iterator[None]:
    """Skip torch's profiler ranges, such as those in ``step`` and a loader's ``next``, while nothing records them.

    A range takes about 10 us even without a profiler; the step of a small model takes only ten times as long.
    """
    # Methods are replaced, and not the class, which TorchScript and Dynamo know. ``functools.wraps`` makes TorchScript
    # compile the source of torch's methods.
    original_enter, original_exit = record_function.__enter__, record_function.__exit__

    @functools.wraps(original_enter)
    def enter(self: record_function) -> Any:
        if _is_recorded():
            return original_enter(self)  # type: ignore[no-untyped-call]
        self.record = None
        return self

    @functools.wraps(original_exit)
    def leave(self: record_function, *error: Any) -> None:
        if self.record is not None:
            original_exit(self, *error)

    with replaced(record_function, "__enter__", enter), replaced(record_function, "__exit__", leave):
        yield


def _is_recorded() -> bool:
    """Return whether a profiler, ``torch.jit.trace`` or a dispatch mode, such as that of ``make_fx``, is active."""
    return (
        torch.autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


@contextmanager
def timed_steps(clock: StepClock) -> Iterator[None]:
    """Switch ``clock`` around the step of every optimizer, by torch's global hooks, which leave optimizers as they are.

    The time of a step that fails ends with the next change of part.
    """
    before: dict[int, int] = {}

    def begin(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            before[id(optimizer)] = clock.switch(OPTIMIZER)

    def end(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            clock.switch(before.pop(id(optimizer), OWN))

    handles = [
        optimizers.register_optimizer_step_pre_hook(begin),
        optimizers.register_optimizer_step_post_hook(end),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
