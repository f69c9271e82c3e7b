"""``ParameterUses``: makes parameters whole for torch's operations, with ``zero_lvl=3``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lagom.errors import LagomError
from lagom.extensions.zero.parameters.storage import ParameterStorage
from lagom.run_state.batch_contents import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._ops import OpOverload

    from lagom.extensions.zero.parameters.shards import ParameterShards

_LOW = 1 << 36
"""Tensors at lower addresses may have freed memory: freed memory is at address 0, and a view of it at an offset."""
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
"""Operations that need neither the values nor the memory of their arguments."""
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
"""Operations that overwrite every value of their first argument."""
_address = torch._C.TensorBase.data_ptr


class ParameterUses(TorchDispatchMode):
    """Makes parameters whole before an operation of torch uses them. See Note [Parts of parameters] in shards.py."""

    supports_higher_order_operators = True

    def __init__(self, weights: ParameterShards, *, apart: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._is_other_thread = apart
        """Whether this mode is for a thread that does not train, where a parameter may lose its memory at any time."""
        self._written: dict[Any, tuple[int | str, ...]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return False: this is a user mode. torch calls its infrastructure modes (tracing) after all user modes."""
        return False

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = self._weights
        if self._is_other_thread:
            if weights.units and function not in _NO_VALUES:
                _refuse_in_thread(weights, tensors((args, kwargs)))
            return function(*args, **kwargs)
        if not weights.units or weights.is_busy or function in _NO_VALUES:
            return function(*args, **kwargs)
        written = self._written.get(function)
        if written is None:
            written = self._written[function] = _written_arguments(function)
        given = tensors((args, kwargs) if kwargs else args)
        blank: list[ParameterStorage] = []
        if any(map(_is_low, given)):
            # Make all parameters of the operation whole in one call, so that none is freed to make room for another.
            blank = weights.make_whole(find_storages(weights, given), self._blank(function, args))
        if not written:
            return function(*args, **kwargs)
        changed = find_storages(weights, tensors([*_select_arguments(args, kwargs, written)]))
        try:
            result = function(*args, **kwargs)
        except BaseException:
            weights.free_unwritten(blank)  # the program may catch the error, such as one about a shape, and go on
            raise
        weights.mark_changed(changed)
        return result

    def _blank(self, function: Any, args: tuple[Any, ...]) -> list[ParameterStorage]:
        """Return a list with the parameter that the operation overwrites as a whole without reading it; [] if none."""
        if function not in _OVERWRITE:
            return []
        unit = self._weights.find_storage(args[0])
        if unit is None or args[0].nbytes != unit.num_bytes or unit in find_storages(self._weights, tensors(args[1:])):
            return []
        return [unit]


def _is_low(tensor: Tensor) -> bool:
    try:
        return _address(tensor) < _LOW
    except RuntimeError:  # sparse or fake tensors have no memory of their own
        return False


def find_storages(weights: ParameterShards, given: Iterable[Tensor]) -> list[ParameterStorage]:
    """Return the storages of the tensors that are sharded."""
    return [unit for tensor in given if (unit := find_storage(weights, tensor)) is not None]


def find_storage(weights: ParameterShards, tensor: Tensor) -> ParameterStorage | None:
    """Return the storage of ``tensor``, if it is sharded; else None."""
    if not weights.units:
        return None
    try:
        return weights.find_storage(tensor)
    except (RuntimeError, NotImplementedError):  # some tensors have no storage
        return None


def _written_arguments(function: Any) -> tuple[int | str, ...]:
    """Return the positions and names of the arguments that an operation changes."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    found: list[int | str] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [i, argument.name]
    return tuple(found)


def _select_arguments(args: Sequence[Any], kwargs: dict[str, Any], written: tuple[int | str, ...]) -> Iterator[Any]:
    for place in written:
        if isinstance(place, str):
            if place in kwargs:
                yield kwargs[place]
        elif place < len(args):
            yield args[place]


def make_thread_bootstrap(weights: ParameterShards) -> Callable[[threading.Thread], None]:
    """Return a ``Thread._bootstrap_inner`` that makes the use of a sharded parameter in the thread an error.

    Without that check, the thread would read freed memory, and the process would crash.
    """
    original = vars(threading.Thread)["_bootstrap_inner"]

    def run(self: threading.Thread) -> None:
        with ParameterUses(weights, apart=True):
            original(self)

    return run


def _refuse_in_thread(weights: ParameterShards, given: Iterable[Tensor]) -> None:
    if find_storages(weights, given):
        raise LagomError(
            "a parameter is used in another thread than the one that trains; with zero_lvl=3 it is whole only where "
            "training needs it: use it, or a copy of its numbers, in the thread that trains, or use zero_lvl=2"
        )
