"""Parameters with ``zero_lvl=3``: shared out as they are made, and whole while anything is done with them."""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lagom.errors import LagomError
from lagom.patching.replace import replaced
from lagom.patching.weights_state import state_that_fits
from lagom.strategies.zero.unit import Unit
from lagom.strategies.zero.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._ops import OpOverload

    from lagom.patching.session import Session

_LOW = 1 << 36
"""Addresses below are looked at: a tensor whose memory has been let go of is at 0, or, as a view, at its offset."""
_aten = torch.ops.aten
_NO_VALUES = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
"""Operations that need no values, and no memory, of their arguments."""
_OVERWRITE = {
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.random_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
}
"""Operations after which nothing is left of what their first argument was."""
_address = torch._C.TensorBase.data_ptr


@contextmanager
def sharded_weights(session: Session) -> Iterator[Weights]:
    """Have parameters shared out, and made whole for every operation that needs them."""
    assert session.group is not None
    assert session.watch is not None
    assert session.replicate is not None
    weights = session.weights = Weights(
        session.group,
        session.leaves,
        lambda: session.may_meet or (session.distributed and session.depth > 0),
        session.say_once,
    )
    session.watch.sums = weights.sums
    session.replicate.tell_by(weights.digest)
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
        state_dict = state_that_fits(session, weights, vars(torch.nn.Module)["state_dict"])
        stack.enter_context(replaced(torch.nn.Module, "state_dict", state_dict))
        stack.enter_context(replaced(threading.Thread, "_bootstrap_inner", _in_thread(weights)))
        stack.enter_context(Uses(weights))
        yield weights
        if not session.joined:
            weights.end()


class Uses(TorchDispatchMode):
    """Sees each operation before it runs. See Note [Parts of parameters]."""

    supports_higher_order_operators = True

    def __init__(self, weights: Weights, *, apart: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._apart = apart
        """In a thread that does not train, below which a parameter may be let go of at any time."""
        self._written: dict[Any, tuple[int | str, ...]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = self._weights
        if self._apart:
            if weights.units and function not in _NO_VALUES:
                _refuse_apart(weights, [*_tensors(args), *_tensors(kwargs.values())])
            return function(*args, **kwargs)
        if not weights.units or weights.is_busy or function in _NO_VALUES:
            return function(*args, **kwargs)
        written = self._written.get(function)
        if written is None:
            written = self._written[function] = _written(function)
        given = [*_tensors(args), *_tensors(kwargs.values())] if kwargs else [*_tensors(args)]
        blank: list[Unit] = []
        if any(map(_is_low, given)):
            # All that it uses, lest one is let go of for another.
            blank = weights.need(_units(weights, given), self._blank(function, args))
        if not written:
            return function(*args, **kwargs)
        changed = _units(weights, _tensors(_at(args, kwargs, written)))
        try:
            result = function(*args, **kwargs)
        except BaseException:
            weights.unchanged(blank)  # as where shapes do not match, and the program leaves that one out
            raise
        weights.changed(changed)
        return result

    def _blank(self, function: Any, args: tuple[Any, ...]) -> list[Unit]:
        """What is overwritten as a whole, and not read."""
        if function not in _OVERWRITE:
            return []
        unit = self._weights.unit(args[0])
        if unit is None or args[0].nbytes != unit.num_bytes or unit in _units(self._weights, _tensors(args[1:])):
            return []
        return [unit]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_low(tensor: Tensor) -> bool:
    try:
        return _address(tensor) < _LOW
    except RuntimeError:  # sparse, or fake: no memory of its own
        return False


def _units(weights: Weights, tensors: Iterable[Tensor]) -> list[Unit]:
    return [unit for tensor in tensors if (unit := _unit(weights, tensor)) is not None]


def _unit(weights: Weights, tensor: Tensor) -> Unit | None:
    if not weights.units:
        return None
    try:
        return weights.unit(tensor)
    except (RuntimeError, NotImplementedError):  # what has no storage
        return None


def _written(function: Any) -> tuple[int | str, ...]:
    """Places and names of the arguments that an operation changes."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    found: list[int | str] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [i, argument.name]
    return tuple(found)


def _at(args: Sequence[Any], kwargs: dict[str, Any], written: tuple[int | str, ...]) -> Iterator[Any]:
    for place in written:
        if isinstance(place, str):
            if place in kwargs:
                yield kwargs[place]
        elif place < len(args):
            yield args[place]


def _in_thread(weights: Weights) -> Callable[[threading.Thread], None]:
    """A thread in which using a parameter is an error, and not the end of the process."""
    original = vars(threading.Thread)["_bootstrap_inner"]

    def run(self: threading.Thread) -> None:
        with Uses(weights, apart=True):
            original(self)

    return run


def _refuse_apart(weights: Weights, tensors: Iterable[Tensor]) -> None:
    if _units(weights, tensors):
        raise LagomError(
            "a parameter is used in another thread than the one that trains; with zero_lvl=3 it is whole only where "
            "training needs it: use it, or a copy of its numbers, in the thread that trains, or use zero_lvl=2"
        )


def _changing(weights: Weights, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that writes to its tensor past torch's operations."""

    @functools.wraps(original)
    def method(self: Tensor, *args: Any) -> Any:
        units = _units(weights, _tensors([self, *args]))
        if not units:
            return original(self, *args)
        weights.need(units)
        try:
            return original(self, *args)
        finally:
            weights.changed(_units(weights, [self]))

    return method


def _shared(weights: Weights, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def share_memory_(self: Tensor) -> Any:
        if _unit(weights, self) is not None:
            raise LagomError(
                "share_memory() would have other processes see a parameter of which, with zero_lvl=3, each rank has a "
                "part; share clones of its tensors, or use zero_lvl=2"
            )
        return original(self)

    return share_memory_


def _held(weights: Weights, original: Callable[..., Any], *, for_good: bool = False) -> Callable[..., Any]:
    """A method that gives away where the values are."""

    @functools.wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = None if weights.is_busy else _unit(weights, self)
        if unit is not None:
            weights.hold(unit, for_good=for_good)
        return original(self, *args, **kwargs)

    return method


def _whole(weights: Weights, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = _unit(weights, self)
        if unit is not None:
            weights.need([unit])
        return original(self, *args, **kwargs)

    return method


def _copied(weights: Weights, original: Callable[..., Any]) -> Callable[..., Any]:
    """``__reduce_ex__``, which gives away the memory, to be read much later."""

    @functools.wraps(original)
    def reduce(self: Tensor, protocol: Any) -> Any:
        if _unit(weights, self) is None or isinstance(self, torch.nn.Parameter):
            return original(self, protocol)
        with torch.no_grad():
            copy = self.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        return original(copy, protocol)

    return reduce


def _deepcopied(weights: Weights, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or _unit(weights, self) is None or not self.is_leaf:
            return original(self, memo)
        with torch.no_grad():
            copy = self.clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    return deepcopy


def _data(weights: Weights) -> property:
    original = vars(torch._C.TensorBase)["data"]

    def put(self: Tensor, value: Tensor) -> None:
        original.__set__(self, value)
        weights.adopt(self)

    return property(original.__get__, put, original.__delete__, original.__doc__)
