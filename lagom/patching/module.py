"""Modules and parameters: which there are, and what happens around an outermost forward."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
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
    called = WeakIdKeyDictionary()
    on_cuda = session.device.type == "cuda"
    inside = False

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return original(module, *args, **kwargs)
        inside = True
        try:
            if on_cuda:
                follow_input(module, args, kwargs, session.device)
            if not _is_partial(module, session):
                return original(module, *args, **kwargs)
            if module not in called:
                called[module] = None
                return original(module, *args, **kwargs)
            with streams.in_forward():
                return original(module, *args, **kwargs)
        finally:
            inside = False

    with replaced(nn.Module, "__call__", call):
        yield


def _is_partial(module: nn.Module, session: Session) -> bool:
    return (
        session.distributed
        and session.depth == 0
        and module.training
        and torch.is_grad_enabled()
        and session.share is not None
    )
