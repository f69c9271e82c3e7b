"""``fast_steps``: optimizers make no entry for a profiler where none looks."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer, optimizer

from lagom.monitor.spans import OPTIMIZER
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.monitor.spans import Spans
    from lagom.session.session import Session

_NONE: frozenset[int] = frozenset()


@contextmanager
def fast_steps(session: Session) -> Iterator[None]:
    """Have ``step`` and ``zero_grad`` make no entry for a profiler where none looks, which takes 10 us."""
    with ExitStack() as stack:
        stack.enter_context(replaced(Optimizer, "zero_grad", _zeroing(session)))
        if not session.plan.zero_lvl:  # whose steps are wrapped already
            stack.enter_context(_unprofiled(session))
        yield


def _zeroing(session: Session) -> Callable[..., None]:
    original = vars(Optimizer)["zero_grad"]

    @functools.wraps(original)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        # The name is made by the first call.
        if not set_to_none or "_zero_grad_profile_name" not in vars(self) or _is_looked_at() or not session.live:
            original(self, set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = None

    return zero_grad


@contextmanager
def _unprofiled(session: Session) -> Iterator[None]:
    """Have ``step`` of torch's classes go past the wrapper that their first instance puts around it, where it may.

    Not of a program's own, which cloudpickle would take along with all that a run has.
    """
    wrap = vars(Optimizer)["_patch_step_function"]
    torchs = Optimizer.profile_hook_step(_hooked).__code__

    with ExitStack() as stack:

        def patch(kind: type) -> None:
            current = vars(kind).get("step")
            # Not by attributes, which decorators copy.
            if kind.__module__.startswith("torch.") and getattr(current, "__code__", None) is torchs:
                stack.enter_context(replaced(kind, "step", _hooked(session, current)))

        def patched_wrap(self: Optimizer) -> None:
            wrap(self)
            for kind in type(self).__mro__:
                if kind is not Optimizer:
                    patch(kind)

        for kind in kinds(Optimizer):
            patch(kind)
        stack.enter_context(replaced(Optimizer, "_patch_step_function", patched_wrap))
        yield


def _hooked(session: Session, wrapper: Any) -> Callable[..., Any]:
    inner, spans = wrapper.__wrapped__, session.spans
    if spans is not None:
        inner = _timed(spans, inner)

    @functools.wraps(wrapper)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        own = _NONE if spans is None else spans.step_hooks
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or not optimizer._global_optimizer_pre_hooks.keys() <= own
            or not optimizer._global_optimizer_post_hooks.keys() <= own
            or _is_looked_at()
            or not session.live
        ):
            return wrapper(self, *args, **kwargs)
        result = inner(self, *args, **kwargs)
        self._optimizer_step_code()
        return result

    vars(step)["__wrapped__"] = wrapper.__wrapped__
    return step


def _timed(spans: Spans, inner: Callable[..., Any]) -> Callable[..., Any]:
    """``inner``, noted as the hooks of a timeline would, of which the first alone sends a step the long way."""
    clock, append = spans.clock, spans.append

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not spans.keeps:
            return inner(self, *args, **kwargs)
        start = clock()
        result = inner(self, *args, **kwargs)
        append((OPTIMIZER, f"{type(self).__name__}.step", start, clock(), get_ident()))
        return result

    return step


def _is_looked_at() -> bool:
    return torch.compiler.is_compiling() or torch.autograd._profiler_enabled()


def kinds(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    """All classes below ``kind``."""
    for below in kind.__subclasses__():
        yield below
        yield from kinds(below)
