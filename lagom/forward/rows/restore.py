"""``restored_state``: restore the state that a probed forward has changed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lagom.errors import LagomError
from lagom.forward.rows.surroundings import Surroundings
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.inspection.reads import attributes
from lagom.inspection.state_parts import RestoreError, StateCopy, StatePart, has_items, state_parts
from lagom.random_states import equal_state, random_states, set_random_states
from lagom.run_state.random_streams import DRAWING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

SMALL = 1e-3
"""Parameters whose largest absolute value is at most this are taken for gates that start closed, and will grow."""


class ChangedError(LagomError):
    """A forward has changed parameters in a probe, or objects that cannot be restored."""


class ModuleState:
    """Copies of random states, modules' buffers and attributes, and what else forwards can reach, made at creation.

    Raises:
        NotByRowsError: when something cannot be copied, so that a probe could not be undone.
    """

    def __init__(self, inside: Sequence[nn.Module]) -> None:
        self._random = random_states()
        self._buffers = copy_buffers(inside)
        own = [part for module in inside for part in _attribute_parts(module)]
        known = {id(part.of) for part in own}
        self._parts = [*own, *(part for part in Surroundings(inside).parts if id(part.of) not in known)]
        try:
            self._copies = [part.copy() for part in self._parts]
        except RestoreError as error:
            raise NotByRowsError(WholeReason.NOT_RESTORABLE, error=error) from error

    def restore(self) -> None:
        """Restore everything that was copied and has changed.

        Raises:
            ChangedError: when a part cannot be restored; all other parts are.
        """
        set_random_states(self._random)
        restore_buffers(self._buffers)
        failures = [failure for copy in self._copies if (failure := _restore(copy)) is not None]
        if failures:
            raise ChangedError(
                f"lagom has run a forward once more, to look whether ranks or micro-batches can share out its rows, "
                f"and cannot undo what it changed: {'; '.join(failures)}. Use batches='split', "
                "evaluation='replicated' and no micro_batches for this program"
            )

    def changed_generators(self) -> list[str]:
        """Return the names of the generators that have drawn since the copies were made."""
        now = random_states()
        return [name for name, state in self._random.items() if not equal_state(state, now[name])]

    def has_same_buffers(self) -> bool:
        """Return whether buffers have the same values as before."""
        return all(torch.equal(buffer, content) for buffer, content in self._buffers)

    def is_unchanged(self) -> bool:
        """Return whether everything that was copied holds the same objects as before, and buffers the same values."""
        return not any(copy.has_changed() for copy in self._copies) and self.has_same_buffers()

    def key(self) -> object:
        """Return a key that changes with plain values and containers among what was copied, without tensors."""
        return [part.key() for part in self._parts]


def _attribute_parts(module: nn.Module) -> Iterator[StatePart]:
    yield from state_parts(module)
    for value in list((attributes(module) or {}).values()):
        if has_items(value):
            yield from state_parts(value)


def _restore(copy: StateCopy) -> str | None:
    try:
        copy.restore()
    except RestoreError as error:
        return str(error)
    return None


@contextmanager
def restored_state(module: nn.Module, inside: Sequence[nn.Module], *, opens: bool = True) -> Iterator[ModuleState]:
    """Yield copies of the state that forwards of ``inside`` can change; restore it at the end.

    Args:
        opens: whether parameters that are almost zero are enlarged in between.

    Raises:
        NotByRowsError: before anything has run, when something cannot be copied.
        ChangedError: at the end, when something cannot be restored.
    """
    with DRAWING:  # otherwise a thread's draws would be undone too
        state = ModuleState(inside)
        small = _enlarge_small_parameters(module) if opens else []
        try:
            yield state
        finally:
            for parameter, before in small:
                parameter.data.copy_(before)
            state.restore()


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
