"""Modules and parameters: which there are, and what happens around an outermost forward."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from lagom.patching.device import follow_input
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.patching.random import OwnStreams
    from lagom.patching.session import Session


@contextmanager
def tracked_modules(session: Session) -> Iterator[None]:
    """Note modules and parameters as they are made: constructed, unpickled or copied."""
    init, setstate = vars(nn.Module)["__init__"], vars(nn.Module)["__setstate__"]

    def patched_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        session.modules[self] = None

    def patched_setstate(self: nn.Module, state: dict[str, Any]) -> None:
        setstate(self, state)
        session.modules[self] = None

    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "__init__", patched_init))
        stack.enter_context(replaced(nn.Module, "__setstate__", patched_setstate))
        for kind in (nn.Parameter, UninitializedParameter):
            stack.enter_context(replaced(kind, "__new__", staticmethod(_numbered(session, kind.__new__))))
        yield


def _numbered(session: Session, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def patched_new(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameter = make(cls, *args, **kwargs)
        session.leaves.created(parameter)
        return parameter

    return patched_new


@contextmanager
def own_forwards(session: Session, streams: OwnStreams) -> Iterator[None]:
    """Around an outermost forward: bring the module to its input's device, and draw from the rank's own stream.

    The own stream serves where ranks have different samples of a batch: dropout must differ there. Not in a
    module's first call, in which parameters may be made, nor in a backward, where checkpoints repeat a forward.
    """
    original = vars(nn.Module)["__call__"]
    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    called = WeakIdKeyDictionary()
    on_cuda = session.device.type == "cuda"
    inside = False

    def draws_own(function: Any) -> bool:
        if not _is_partial(function, session):
            return False
        if isinstance(function, nn.Module) and function not in called:
            called[function] = None
            return False
        return True

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return original(module, *args, **kwargs)
        inside = True
        try:
            if on_cuda:
                follow_input(module, args, kwargs, session.device)
            if not draws_own(module):
                return original(module, *args, **kwargs)
            with streams.in_forward():
                return original(module, *args, **kwargs)
        finally:
            inside = False

    def checkpointed(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        # It notes the state of the generators before it calls the module, to repeat it in the backward.
        nonlocal inside
        if inside or session.depth:
            yield from generator(function, *args, **kwargs)
            return
        inside = True
        try:
            with streams.in_forward() if draws_own(function) else nullcontext():
                yield from generator(function, *args, **kwargs)
        finally:
            inside = False

    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "__call__", call))
        if session.world_size > 1:
            name = "_checkpoint_without_reentrant_generator"
            stack.enter_context(replaced(torch.utils.checkpoint, name, checkpointed))
        yield


def _is_partial(function: Any, session: Session) -> bool:
    return (
        session.distributed
        and session.depth == 0
        and getattr(function, "training", True)
        and torch.is_grad_enabled()
        and session.share is not None
    )
