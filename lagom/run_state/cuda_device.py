"""CUDA: move batches and modules to the rank's device, so that a program need not name it."""

from __future__ import annotations

import copy
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from lagom.run_state.nested_tensors import tensors

if TYPE_CHECKING:
    from torch import nn


def move_to_device(data: Any, device: torch.device) -> Any:
    """Return ``data`` with its tensors on ``device``; containers keep their types, other objects stay.

    What has a method ``to`` moves itself: packed sequences, batches of libraries, modules.
    """
    if isinstance(data, torch.Tensor):
        # CUDA has read memory that is not pinned when the call returns, and need not wait for the GPU's work before.
        return data.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(type(data), "to", None)):
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(part, device) for part in data))
    if type(data) in (list, tuple):
        return type(data)(move_to_device(part, device) for part in data)
    if isinstance(data, dict):
        moved = copy.copy(data)  # a state_dict() has attributes
        moved.update((key, move_to_device(part, device)) for key, part in data.items())
        return moved
    return data


class InputFollower:
    """Moves modules to ``device`` that are still on the CPU and whose input is on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, tuple[weakref.ref[nn.Module], torch.Tensor]] = {}
        """A parameter or buffer of each module, by its id: finding one takes longer than all else."""

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move ``module``, which is about to be called, if it has to.

        ``Module.to`` keeps the Parameter objects, so optimizers made earlier stay valid. In a transform of torch.func a
        module cannot be moved, and its parameters go one by one (``MixedDevices``).
        """
        known = self._states.get(id(module))
        state = known[1] if known is not None else self._find_state(module)
        if state is None or not state.is_cpu or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if any(tensor.device.type == self._device.type for tensor in tensors((args, kwargs))):
            module.to(self._device)

    def _find_state(self, module: nn.Module) -> torch.Tensor | None:
        state = next(chain(module.parameters(), module.buffers()), None)
        if state is not None:
            key, states = id(module), self._states
            states[key] = weakref.ref(module, lambda _: states.pop(key, None)), state
        return state
