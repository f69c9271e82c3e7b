"""``replace_steps``: replace the ``step`` method of each optimizer class."""

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
def replace_steps(
    step_for: Callable[[type, Callable[..., Any]], Callable[..., Any]], *, existing: bool
) -> Iterator[None]:
    """Replace the ``step`` of optimizer classes when their next instance is made; torch's hooks still run around it.

    Args:
        step_for: takes a class and its original ``step`` (without torch's wrapper for hooks), and returns the new one.
        existing: whether to replace the steps of all existing classes at once.
    """
    wrap = vars(Optimizer)["_patch_step_function"]
    ours: set[object] = set()
    with ExitStack() as stack:

        def patch(kind: type) -> None:
            current = vars(kind)["step"]
            if ours.isdisjoint(_decorated(current)):  # a decorator may be around a step that is replaced already
                patched = _wrap_inside_hooks(current, functools.partial(step_for, kind))
                ours.add(patched)
                stack.enter_context(replaced(kind, "step", patched))

        def patched_wrap(self: Optimizer) -> None:
            step = type(self).step
            if step in ours and not getattr(step, "hooked", False):
                stack.enter_context(replaced(type(self), "step", step))  # restores what ``wrap`` sets, around ours
            wrap(self)
            for kind in type(self).__mro__:
                if kind is not Optimizer and "step" in vars(kind):
                    patch(kind)

        for kind in _subclasses(Optimizer) if existing else ():
            if "step" in vars(kind):
                patch(kind)
        stack.enter_context(replaced(Optimizer, "_patch_step_function", patched_wrap))
        yield


def _wrap_inside_hooks(
    current: Callable[..., Any], step_for: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    # The code tells torch's wrapper for hooks from a decorator around it, which has copied its attributes.
    is_torchs = getattr(current, "__code__", None) is _HOOKS_CODE
    inner: Callable[..., Any] = vars(current)["__wrapped__"] if is_torchs else current
    found: Any = torch._disable_dynamo(functools.wraps(inner)(step_for(inner)))
    if is_torchs:  # a base class has no hooks of its own, unless it has instances
        found = Optimizer.profile_hook_step(found)
        found.hooked = True
    return found


_HOOKS_CODE = Optimizer.profile_hook_step(lambda: None).__code__


def _decorated(step: Callable[..., Any] | None) -> Iterator[object]:
    """Yield ``step`` and the functions that it decorates."""
    while step is not None:
        yield step
        step = getattr(step, "__wrapped__", None)


def _subclasses(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
