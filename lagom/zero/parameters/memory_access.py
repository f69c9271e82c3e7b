"""``unshard_on_memory_access``: makes parameters whole when their values are read past torch's operations."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagom.errors import LagomError
from lagom.patching.replace import replaced
from lagom.run_state.nested_tensors import tensors
from lagom.zero.parameters.dispatch import unit_of, units_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.zero.parameters.shards import ParameterShards


@contextmanager
def unshard_on_memory_access(weights: ParameterShards) -> Iterator[None]:
    """Patch the functions that read, write, copy or expose the memory of a tensor directly."""
    with ExitStack() as stack:
        for name in ("numpy", "data_ptr", "untyped_storage"):
            stack.enter_context(replaced(Tensor, name, _held(weights, vars(torch._C.TensorBase)[name])))
        stack.enter_context(replaced(Tensor, "__dlpack__", _held(weights, vars(Tensor)["__dlpack__"], for_good=True)))
        for owner, name in ((torch, "to_dlpack"), (torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack")):
            stack.enter_context(replaced(owner, name, _held(weights, vars(owner)[name], for_good=True)))
        for name in ("apply_", "map_", "map2_"):
            stack.enter_context(replaced(Tensor, name, _changing(weights, vars(torch._C.TensorBase)[name])))
        stack.enter_context(replaced(Tensor, "share_memory_", _shared(weights, vars(Tensor)["share_memory_"])))
        stack.enter_context(replaced(Tensor, "tolist", _whole(weights, vars(torch._C.TensorBase)["tolist"])))
        stack.enter_context(replaced(Tensor, "__repr__", _whole(weights, vars(Tensor)["__repr__"])))
        stack.enter_context(replaced(Tensor, "__reduce_ex__", _copied(weights, vars(Tensor)["__reduce_ex__"])))
        stack.enter_context(replaced(Tensor, "__deepcopy__", _deepcopied(weights, vars(Tensor)["__deepcopy__"])))
        stack.enter_context(replaced(Tensor, "data", _data(weights)))
        yield


def _changing(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that writes to its tensor past torch's operations."""

    @functools.wraps(original)
    def method(self: Tensor, *args: Any) -> Any:
        units = units_of(weights, tensors([self, *args]))
        if not units:
            return original(self, *args)
        weights.need(units)
        try:
            return original(self, *args)
        finally:
            weights.changed(units_of(weights, [self]))

    return method


def _shared(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def share_memory_(self: Tensor) -> Any:
        if unit_of(weights, self) is not None:
            raise LagomError(
                "share_memory() would have other processes see a parameter of which, with zero_lvl=3, each rank has a "
                "part; share clones of its tensors, or use zero_lvl=2"
            )
        return original(self)

    return share_memory_


def _held(weights: ParameterShards, original: Callable[..., Any], *, for_good: bool = False) -> Callable[..., Any]:
    """Return a method that exposes the address of the values."""

    @functools.wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = None if weights.is_busy else unit_of(weights, self)
        if unit is not None:
            weights.hold(unit, for_good=for_good)
        return original(self, *args, **kwargs)

    return method


def _whole(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(weights, self)
        if unit is not None:
            weights.need([unit])
        return original(self, *args, **kwargs)

    return method


def _copied(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``__reduce_ex__`` for sharded parameters: it exposes memory that may be read much later."""

    @functools.wraps(original)
    def reduce(self: Tensor, protocol: Any) -> Any:
        if unit_of(weights, self) is None or isinstance(self, torch.nn.Parameter):
            return original(self, protocol)
        with torch.no_grad():
            copy = self.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        return original(copy, protocol)

    return reduce


def _deepcopied(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or unit_of(weights, self) is None or not self.is_leaf:
            return original(self, memo)
        with torch.no_grad():
            copy = self.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    return deepcopy


def _data(weights: ParameterShards) -> property:
    original = vars(torch._C.TensorBase)["data"]

    def put(self: Tensor, value: Tensor) -> None:
        original.__set__(self, value)
        weights.adopt(self)

    return property(original.__get__, put, original.__delete__, original.__doc__)
