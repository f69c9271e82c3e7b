"""Functions that move batches and modules to the rank's GPU, so that a program need not name the device."""

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
    """Return ``data`` with its tensors on ``device``; containers keep their types, other objects are not changed.

    An object with a method ``to`` is moved by this method: packed sequences, batches of libraries, modules.
    """
    if isinstance(data, torch.Tensor):
        # With ``non_blocking`` the call does not wait for earlier work of the GPU. It is safe: when the call returns,
        # CUDA has read memory that is not pinned.
        return data.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(type(data), "to", None)):
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(part, device) for part in data))
    if type(data) in (list, tuple):
        return type(data)(move_to_device(part, device) for part in data)
    if isinstance(data, dict):
        moved = copy.copy(data)  # a copy keeps attributes, such as those of a ``state_dict()``
        moved.update((key, move_to_device(part, device)) for key, part in data.items())
        return moved
    return data


class InputFollower:
    """Moves a module from the CPU to ``device`` when it is called with an input on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, tuple[weakref.ref[nn.Module], torch.Tensor]] = {}
        """A parameter or buffer of each module, by the module's id: a search takes longer than all other work here."""

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move ``module``, which is about to be called, if it is on the CPU and an input is on the device.

        ``Module.to`` keeps the Parameter objects, so optimizers made earlier stay valid. Inside a transform of
        torch.func a module cannot be moved: there ``MixedDevices`` moves each parameter where it is used.
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
