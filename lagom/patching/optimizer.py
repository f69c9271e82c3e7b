"""Optimizers: each rank steps a part of the parameters, and the state that a program sees is whole."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lagom.patching.gradient import parted_gradients
from lagom.patching.replace import replaced
from lagom.patching.stepping import kinds
from lagom.patching.weights import sharded_weights
from lagom.strategies.zero.optimizers import Optimizers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.patching.session import Session


@contextmanager
def sharded_steps(session: Session) -> Iterator[None]:
    """Have ``step`` of every optimizer class step this rank's part, and ``Optimizer.state`` be whole.

    Each class has a ``step`` of its own, which its first instance wraps for hooks. Hooks stay outermost.
    """
    assert session.group is not None
    assert session.frame is not None
    assert session.watch is not None
    assert session.replicate is not None
    wrap = vars(Optimizer)["_patch_step_function"]
    ours: set[object] = set()

    with ExitStack() as stack:
        if session.plan.zero_lvl > 1:
            session.gradients = stack.enter_context(parted_gradients(session))
            session.replicate.overlap.parts = session.gradients
        if session.plan.zero_lvl > 2:
            assert session.gradients is not None
            weights = stack.enter_context(sharded_weights(session))
            session.gradients.parts_of = weights.parts
        optimizers = session.optimizers = Optimizers(
            session.group,
            session.frame,
            session.watch,
            session.gradients,
            session.weights,
            is_own=session.replicate.keeps_own,
            say=session.say_once,
            name=session.modules.name_of,
        )

        def patch(kind: type) -> None:
            current = vars(kind)["step"]
            if current not in ours:
                patched = _stepped(session, optimizers, current)
                ours.add(patched)
                stack.enter_context(replaced(kind, "step", patched))

        def patched_wrap(self: Optimizer) -> None:
            wrap(self)
            for kind in type(self).__mro__:
                if kind is not Optimizer and "step" in vars(kind):
                    patch(kind)

        for kind in kinds(Optimizer):
            if "step" in vars(kind):
                patch(kind)
        stack.enter_context(replaced(Optimizer, "_patch_step_function", patched_wrap))
        stack.enter_context(replaced(Optimizer, "state", _state(session, optimizers)))
        yield
        if not session.joined:
            optimizers.end()


def _stepped(session: Session, optimizers: Optimizers, current: Callable[..., Any]) -> Callable[..., Any]:
    """``current``, a class's ``step`` with or without its wrapper for hooks, stepping a part."""
    # Not by hasattr: decorators of torch's copy a function's attributes, but not what they wrapped.
    hooked = vars(current).get("hooked", False)
    inner: Callable[..., Any] = vars(current)["__wrapped__"] if hooked else current

    @torch._disable_dynamo
    @functools.wraps(inner)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not session.distributed or optimizers.passes:
            return inner(self, *args, **kwargs)
        return optimizers.step(self, inner, args, kwargs)

    found: Any = Optimizer.profile_hook_step(step)
    found.hooked = True
    return found  # type: ignore[no-any-return]


def _state(session: Session, optimizers: Optimizers) -> property:
    def get(self: Optimizer) -> Any:
        if "state" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'state'")
        return optimizers.state(self) if session.distributed else vars(self)["state"]

    def put(self: Optimizer, value: Any) -> None:
        vars(self)["state"] = value

    def drop(self: Optimizer) -> None:
        del vars(self)["state"]

    return property(get, put, drop)
