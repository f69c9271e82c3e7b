"""``unshard_on_memory_access``: makes parameters whole when their memory is used without an operation of torch."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagom.errors import LagomError
from lagom.extensions.zero.parameters.dispatch import find_storage, find_storages
from lagom.patching.replace import replaced
from lagom.run_state.batch_contents import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.extensions.zero.parameters.shards import ParameterShards


@contextmanager
def unshard_on_memory_access(weights: ParameterShards) -> Iterator[None]:
    """Patch the functions that read, write, copy or expose the memory of a tensor directly."""
    with ExitStack() as stack:
        for name in ("numpy", "data_ptr", "untyped_storage"):
            stack.enter_context(replaced(Tensor, name, _make_exposing_method(weights, vars(torch._C.TensorBase)[name])))
        stack.enter_context(
            replaced(Tensor, "__dlpack__", _make_exposing_method(weights, vars(Tensor)["__dlpack__"], for_good=True))
        )
        for owner, name in ((torch, "to_dlpack"), (torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack")):
            stack.enter_context(replaced(owner, name, _make_exposing_method(weights, vars(owner)[name], for_good=True)))
        for name in ("apply_", "map_", "map2_"):
            stack.enter_context(replaced(Tensor, name, _make_writing_method(weights, vars(torch._C.TensorBase)[name])))
        stack.enter_context(
            replaced(Tensor, "share_memory_", _make_share_memory(weights, vars(Tensor)["share_memory_"]))
        )
        stack.enter_context(
            replaced(Tensor, "tolist", _make_reading_method(weights, vars(torch._C.TensorBase)["tolist"]))
        )
        stack.enter_context(replaced(Tensor, "__repr__", _make_reading_method(weights, vars(Tensor)["__repr__"])))
        stack.enter_context(replaced(Tensor, "__reduce_ex__", _make_reduce(weights, vars(Tensor)["__reduce_ex__"])))
        stack.enter_context(replaced(Tensor, "__deepcopy__", _make_deepcopy(weights, vars(Tensor)["__deepcopy__"])))
        stack.enter_context(replaced(Tensor, "data", _make_data_property(weights)))
        yield


def _make_writing_method(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes its tensor whole, writes to it without an operation, and marks it as changed."""

    @functools.wraps(original)
    def method(self: Tensor, *args: Any) -> Any:
        units = find_storages(weights, tensors([self, *args]))
        if not units:
            return original(self, *args)
        weights.make_whole(units)
        try:
            return original(self, *args)
        finally:
            weights.mark_changed(find_storages(weights, [self]))

    return method


def _make_share_memory(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def share_memory_(self: Tensor) -> Any:
        if find_storage(weights, self) is not None:
            raise LagomError(
                "share_memory() would have other processes see a parameter of which, with zero_lvl=3, each rank has a "
                "part; share clones of its tensors, or use zero_lvl=2"
            )
        return original(self)

    return share_memory_


def _make_exposing_method(
    weights: ParameterShards, original: Callable[..., Any], *, for_good: bool = False
) -> Callable[..., Any]:
    """Return a method that exposes the address of a tensor's values, and first keeps a sharded parameter in place.

    The parameter stays in place until the next step, or, with ``for_good``, for good.
    """

    @functools.wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = None if weights.is_busy else find_storage(weights, self)
        if unit is not None:
            weights.pin(unit, for_good=for_good)
        return original(self, *args, **kwargs)

    return method


def _make_reading_method(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = find_storage(weights, self)
        if unit is not None:
            weights.make_whole([unit])
        return original(self, *args, **kwargs)

    return method


def _make_reduce(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__reduce_ex__`` that pickles a copy of a tensor with sharded memory, if it is no Parameter itself.

    The copy is needed since the pickler may read the values much later.
    """

    @functools.wraps(original)
    def reduce(self: Tensor, protocol: Any) -> Any:
        if find_storage(weights, self) is None or isinstance(self, torch.nn.Parameter):
            return original(self, protocol)
        with torch.no_grad():
            copy = self.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        return original(copy, protocol)

    return reduce


def _make_deepcopy(weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or find_storage(weights, self) is None or not self.is_leaf:
            return original(self, memo)
        with torch.no_grad():
            copy = self.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    return deepcopy


def _make_data_property(weights: ParameterShards) -> property:
    original = vars(torch._C.TensorBase)["data"]

    def put(self: Tensor, value: Tensor) -> None:
        original.__set__(self, value)
        weights.adopt(self)

    return property(original.__get__, put, original.__delete__, original.__doc__)
