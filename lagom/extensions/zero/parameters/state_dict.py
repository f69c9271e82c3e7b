"""``Module.state_dict()`` with ``zero_lvl=3``: copies on the CPU if the whole does not fit the device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lagom.accelerators import free_bytes
from lagom.run_state.memory_layout import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from lagom.extensions.zero.parameters.shards import ParameterShards
    from lagom.session.session import Session

_SPARE = 0.1
"""Fraction of the free memory that is left to the rest of the program."""


def make_state_dict(session: Session, weights: ParameterShards, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``Module.state_dict`` that gives copies on the CPU if all its tensors, whole, do not fit the device."""
    inside = False

    @functools.wraps(original)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or weights.is_streamed or not session.live or not weights.units:
            return original(self, *args, **kwargs)  # ``inside``: torch calls it for each submodule
        inside = True
        try:
            state = original(self, *args, **kwargs)
        finally:
            inside = False
        if not _fits(state, weights):
            session.say_once(
                "the whole state_dict() does not fit the device: its tensors are copies on the CPU, and what is "
                "written to them does not reach the model"
            )
            _copy_to_cpu(state)
        return state

    return state_dict


def _fits(state: Any, weights: ParameterShards) -> bool:
    """Return whether each device has memory for the sharded tensors of ``state``; tied ones count once."""
    needed: dict[torch.device, dict[bytes, int]] = {}
    for value in _named_tensors(state):
        unit = weights.find_storage(value)
        if unit is not None and not unit.is_whole:
            needed.setdefault(value.device, {})[unit.key] = unit.num_bytes
    for device, by_unit in needed.items():
        free = free_bytes(device)
        if free is not None and sum(by_unit.values()) > (1 - _SPARE) * free:
            return False
    return True


def _named_tensors(state: Any) -> list[Tensor]:
    # With state_dict(keep_vars=True) the program wants the parameters themselves.
    return [x for x in state.values() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]


def _copy_to_cpu(state: MutableMapping[str, Any]) -> None:
    """Replace tensors by copies on the CPU, one by one, so that few are whole on the device; tied ones stay tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    for key, value in list(state.items()):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            place = _memory_key(value)
            if place not in copies:
                copies[place] = value.detach().to("cpu", copy=True)
            state[key] = copies[place]


def _memory_key(value: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory and layout."""
    if value.layout != torch.strided:
        return (id(value),)
    return storage_of(value)._cdata, value.dtype, value.storage_offset(), value.shape, value.stride()
