"""CUDA: move batches and modules to the rank's device, so that a program need not name it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from lagom.run_state.nested_tensors import tensors

if TYPE_CHECKING:
    from torch import nn


def move_to_device(data: Any, device: torch.device) -> Any:
    """Return ``data`` with its tensors on ``device``; containers keep their types, other objects stay."""
    if isinstance(data, torch.Tensor):
        # CUDA has read memory that is not pinned when the call returns, and need not wait for the GPU's work before.
        return data.to(device, non_blocking=data.device.type == "cpu")
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to_device(part, device) for part in data))
    if type(data) in (list, tuple):
        return type(data)(move_to_device(part, device) for part in data)
    if type(data) is dict:
        return {key: move_to_device(part, device) for key, part in data.items()}
    return data


def follow_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Move ``module`` to ``device`` if it is still on the CPU and its input is on ``device``.

    ``Module.to`` keeps the Parameter objects, so optimizers made earlier stay valid.
    """
    state = next(chain(module.parameters(), module.buffers()), None)
    if state is None or state.device.type != "cpu":
        return
    if any(tensor.device.type == device.type for tensor in tensors((args, kwargs))):
        module.to(device)
