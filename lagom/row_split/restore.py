"""``restored_state``: restore the state that a probed forward has changed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lagom.random_states import equal_state, random_states, set_random_states
from lagom.run_state.random_streams import DRAWING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

SMALL = 1e-3
"""Parameters whose largest absolute value is at most this are taken for gates that start closed, and will grow."""


class ModuleState:
    """Copies of random states and modules' buffers, attributes, and lists and dicts in these, made at creation."""

    def __init__(self, inside: Sequence[nn.Module]) -> None:
        self._random = random_states()
        self._buffers = copy_buffers(inside)
        holders = [holder for module in inside for holder in (module.__dict__, *module.__dict__.values())]
        self._dicts = [(holder, dict(holder)) for holder in holders if isinstance(holder, dict)]
        self._lists = [(holder, list(holder)) for holder in holders if isinstance(holder, list)]

    def restore(self) -> None:
        """Restore everything that was copied."""
        set_random_states(self._random)
        for held, before in self._dicts:
            held.clear()
            held.update(before)
        for items, was in self._lists:
            items[:] = was
        restore_buffers(self._buffers)

    def changed_generators(self) -> list[str]:
        """Return the names of the generators that have drawn since the copies were made."""
        now = random_states()
        return [name for name, state in self._random.items() if not equal_state(state, now[name])]

    def has_same_buffers(self) -> bool:
        """Return whether buffers have the same values as before."""
        return all(torch.equal(buffer, content) for buffer, content in self._buffers)

    def is_unchanged(self) -> bool:
        """Return whether attributes hold the same objects as before, and buffers the same values."""
        return (
            all(_same_objects([*held, *held.values()], [*was, *was.values()]) for held, was in self._dicts)
            and all(_same_objects(items, was) for items, was in self._lists)
            and self.has_same_buffers()
        )


def _same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


@contextmanager
def restored_state(module: nn.Module, inside: Sequence[nn.Module], *, opens: bool = True) -> Iterator[ModuleState]:
    """Yield copies of random states, buffers and attributes; restore them at the end.

    Args:
        opens: whether parameters that are almost zero are enlarged in between.
    """
    with DRAWING:  # otherwise a thread's draws would be undone too
        state = ModuleState(inside)
        small = _enlarge_small_parameters(module) if opens else []
        try:
            yield state
        finally:
            state.restore()
            for parameter, before in small:
                parameter.data.copy_(before)


def _enlarge_small_parameters(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Enlarge parameters that are almost zero, since a closed gate hides the modules behind it; return copies."""
    found: list[tuple[Tensor, Tensor]] = []
    for index, parameter in enumerate(module.parameters()):
        if parameter.is_floating_point() and parameter.numel() and float(parameter.detach().abs().max()) <= SMALL:
            found.append((parameter, parameter.detach().clone()))
            generator = torch.Generator(parameter.device).manual_seed(index)
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return found


def copy_buffers(inside: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer with a copy of its content."""
    found = {
        id(buffer): buffer
        for module in inside
        for buffer in (module.__dict__.get("_buffers") or {}).values()
        if buffer is not None and buffer.layout == torch.strided
    }
    return [(buffer, buffer.detach().clone()) for buffer in found.values()]


def restore_buffers(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Restore buffers to the contents that ``copy_buffers`` has copied."""
    for buffer, content in copies:
        # Write through .data, since a graph may have saved the buffer, and would notice a new version.
        buffer.data.copy_(content)


def parameter_checksums(module: nn.Module) -> list[int]:
    """Return the checksum of each parameter that has one."""
    return [mark for parameter in module.parameters() if (mark := tensor_checksum(parameter)) is not None]


def tensor_checksum(tensor: Tensor) -> int | None:
    """Return the sum of the bits of at most a million elements; None if the tensor has no dense memory."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.itemsize not in _BITS:
        return None
    flat = tensor.detach().reshape(-1)
    some = torch.view_as_real(flat) if flat.is_complex() else flat
    some = (some[:: -(-len(some) // _MANY)] if len(some) > _MANY else some).contiguous()
    if some.numel() * some.itemsize % 8:
        return int(some.view(_BITS[some.itemsize]).sum(dtype=torch.int64))
    # A sum of 8 bytes at a time takes a tenth of the time; torch wants them aligned.
    aligned = some.clone() if some.storage_offset() * some.itemsize % 8 else some
    return int(aligned.view(torch.int64).sum())


_MANY = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
