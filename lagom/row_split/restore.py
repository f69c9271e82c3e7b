"""``restored_state``: restore the state that a probed forward has changed."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lagom.random_states import random_states, set_random_states
from lagom.run_state.random_streams import DRAWING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

SMALL = 1e-3
"""Parameters up to this size are taken for gates that start closed, and will grow."""


@contextmanager
def restored_state(
    module: nn.Module, inside: Sequence[nn.Module], *, opens: bool = True
) -> Iterator[Callable[[], None]]:
    """Restore the random numbers, buffers and attributes that a forward changes; yield a function that does so at once.

    Args:
        opens: enlarge parameters that are almost zero meanwhile.
    """
    with DRAWING:  # otherwise a thread's draws would be undone too
        states, kept = random_states(), [*_attributes(inside), *_contents(inside)]

        def put_back() -> None:
            set_random_states(states)
            for restore in kept:
                restore()

        small = _opened(module) if opens else []
        try:
            yield put_back
        finally:
            put_back()
            for parameter, before in small:
                parameter.data.copy_(before)


def _attributes(inside: Sequence[nn.Module]) -> Iterator[Callable[[], object]]:
    for module in inside:
        for holder in (module.__dict__, *module.__dict__.values()):
            if isinstance(holder, dict):
                yield partial(_refill, holder, dict(holder))
            elif isinstance(holder, list):
                yield partial(holder.__setitem__, slice(None), list(holder))


def _refill(holder: dict[Any, Any], before: dict[Any, Any]) -> None:
    holder.clear()
    holder.update(before)


def _contents(inside: Sequence[nn.Module]) -> Iterator[Callable[[], object]]:
    for buffer, before in buffers_of(inside):
        # Through .data, since a graph may hold the buffer and its version.
        yield partial(buffer.data.copy_, before)


def _opened(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Enlarge parameters that are almost zero, for now: a closed gate hides the modules behind it."""
    found: list[tuple[Tensor, Tensor]] = []
    for index, parameter in enumerate(module.parameters()):
        if parameter.is_floating_point() and parameter.numel() and float(parameter.detach().abs().max()) <= SMALL:
            found.append((parameter, parameter.detach().clone()))
            generator = torch.Generator(parameter.device).manual_seed(index)
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return found


def buffers_of(inside: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer with a copy of its content."""
    found = {
        id(buffer): buffer
        for module in inside
        for buffer in (module.__dict__.get("_buffers") or {}).values()
        if buffer is not None and buffer.layout == torch.strided
    }
    return [(buffer, buffer.detach().clone()) for buffer in found.values()]


def marks_of(module: nn.Module) -> list[int]:
    """Return for each parameter the sum of the bits of at most a million numbers, which differs after a change."""
    marks = []
    for parameter in module.parameters():
        if parameter.layout == torch.strided and not parameter.is_meta and parameter.itemsize in _BITS:
            flat = parameter.detach().reshape(-1)
            some = torch.view_as_real(flat) if flat.is_complex() else flat
            some = some[:: -(-len(some) // _MANY)] if len(some) > _MANY else some
            marks.append(int(some.contiguous().view(_BITS[some.itemsize]).sum(dtype=torch.int64)))
    return marks


_MANY = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
