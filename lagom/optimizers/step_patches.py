"""``replaced_steps``: the ``step`` that each class of optimizers has of its own."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def replaced_steps(
    step_for: Callable[[type, Callable[..., Any]], Callable[..., Any]], *, existing: bool
) -> Iterator[None]:
    """Have classes step otherwise from the next instance on that is made of one. Hooks stay outermost.

    Args:
        step_for: of a class and its own step, without torch's wrapper for hooks: the one in its place.
        existing: those that there are at once.
    """
    wrap = vars(Optimizer)["_patch_step_function"]
    ours: set[object] = set()
    with ExitStack() as stack:

        def patch(kind: type) -> None:
            current = vars(kind)["step"]
            if current not in ours:
                patched = _hooked(current, functools.partial(step_for, kind))
                ours.add(patched)
                stack.enter_context(replaced(kind, "step", patched))

        def patched_wrap(self: Optimizer) -> None:
            wrap(self)
            for kind in type(self).__mro__:
                if kind is not Optimizer and "step" in vars(kind):
                    patch(kind)

        for kind in _classes_below(Optimizer) if existing else ():
            if "step" in vars(kind):
                patch(kind)
        stack.enter_context(replaced(Optimizer, "_patch_step_function", patched_wrap))
        yield


def _hooked(current: Callable[..., Any], step_for: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    # Not by hasattr: decorators of torch's copy a function's attributes, but not what they wrapped.
    hooked = vars(current).get("hooked", False)
    inner: Callable[..., Any] = vars(current)["__wrapped__"] if hooked else current
    found: Any = Optimizer.profile_hook_step(torch._disable_dynamo(functools.wraps(inner)(step_for(inner))))
    found.hooked = True
    return found


def _classes_below(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for below in kind.__subclasses__():
        yield below
        yield from _classes_below(below)
