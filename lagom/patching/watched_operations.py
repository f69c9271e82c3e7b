"""``watched``: calls a function for operations that draw, read or reduce numbers. See Note [Watched operations]."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.library import Library

from lagom.accelerators import dispatch_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._ops import OpOverload

    Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of the operations: those that draw random numbers, and those whose result or its shape depends on values."""
REDUCTIONS = frozenset(("aten::mean", "aten::mean.dim", "aten::sum", "aten::sum.dim_IntList"))
"""Operations that add the elements of a tensor."""
_KEY = torch._C.DispatchKey.PreDispatch
_handlers: list[_Handling] = []
"""Functions of the contexts that are entered, the innermost last."""
_running = threading.local()
"""``depth``: number of handlers that run in this thread; the innermost of the others is called next."""
_libraries: dict[str, Library] = {}
"""Keeps the kernels registered, by the namespace of their operations."""
_num_known = 0
"""Number of torch's operations when kernels were last registered."""


class _Handling(NamedTuple):
    handler: Handler
    of_reductions: bool
    """Whether the handler runs reductions, instead of the operations with ``TAGS``."""


@contextmanager
def watched(handler: Handler, *, of_reductions: bool = False) -> Iterator[None]:
    """Context manager in which ``handler(operation, args, kwargs)`` runs this thread's operations that have ``TAGS``.

    Threads in which torch runs a backward of this thread are included. While a handler runs, only the handlers of outer
    contexts are called.

    Args:
        of_reductions: whether the handler runs the operations of ``REDUCTIONS`` instead.
    """
    if not _libraries:
        register_kernels()
    before, handling = is_watched(), _Handling(handler, of_reductions)
    _handlers.append(handling)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, before)
        _handlers.remove(handling)


def is_watched() -> bool:
    """Return whether a handler is called for this thread's operations."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_KEY)


def register_kernels() -> None:
    """Register kernels for the operations that torch has now, also for those added since the last call."""
    global _num_known
    names = torch._C._dispatch_get_all_op_names()
    if len(names) == _num_known:
        return
    _num_known = len(names)
    for name in names:
        operator, _, overload = name.partition(".")
        try:
            operation = torch._C._get_operation_overload(operator, overload)
        except RuntimeError:  # without a schema
            continue
        if operation is None or (TAGS.isdisjoint(operation[2]) and name not in REDUCTIONS):
            continue
        space, _, packet = operator.partition("::")
        function = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        if not is_composite(function) and not _has_kernel(function, "PreDispatch"):
            if space not in _libraries:
                _libraries[space] = Library(space, "IMPL")
            _libraries[space].impl(function, _kernel(function), "PreDispatch")


def is_composite(function: OpOverload) -> bool:
    """Return whether ``function`` is composed of other operations, leaving aside its kernels for nested tensors."""
    if not torch._C._dispatch_has_kernel(function.name()):
        return False  # such as sym_size, which the dispatcher does not know
    own = any(_has_kernel(function, key) for key in dispatch_keys())
    return _has_kernel(function, "CompositeImplicitAutograd") and not own


def _has_kernel(function: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))


def _kernel(function: OpOverload) -> Callable[..., Any]:
    is_reduction = function.name() in REDUCTIONS

    def run(*args: Any, **kwargs: Any) -> Any:
        was_included, before = is_watched(), getattr(_running, "depth", 0)
        depth = before
        while depth < len(_handlers) and _handlers[-1 - depth].of_reductions != is_reduction:
            depth += 1
        _running.depth = depth + 1
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, len(_handlers) > depth + 1)
        try:
            if depth >= len(_handlers):
                return function(*args, **kwargs)
            return _handlers[-1 - depth].handler(function, args, kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, was_included)
            _running.depth = before

    return run


# Note [Watched operations]
#
# A TorchDispatchMode sees all operations, and costs 10 to 20 us for each: a small transformer's forward takes twice as
# long. So lagom registers kernels for the few operations that matter, under a dispatch key that precedes all others.
# The key is in no tensor; a thread includes it while it is in the context. All other operations have torch's own
# fallthrough for this key, which costs nothing. torch itself uses the key only when it traces a model for export.
#
# Beside a dispatch mode there are these differences:
#
# - The kernel runs before autograd, not after it. A handler that must run after it enters a mode.
# - Composite operations have no kernel here: the dispatcher takes them apart, and calls the kernels of their parts.
# - Some operations that torch's own kernels call are seen too: all of them in inference mode, else those of kernels
#   that are not below autograd (``histc``, a mask in ``index_put``). A forward with such operations keeps the mode.
# - A mode keeps Dynamo from compiling. Compiled code does not call single operations, so they would not be seen.
# - The end of a trace for export leaves the key out.
# - A higher-order operator (flex_attention) has no kernel for the key, and raises an error. So it does with a mode.
