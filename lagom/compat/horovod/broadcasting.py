"""Parameters, optimizers' states and other objects, from one rank to all, or from all to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from lagom.compat.horovod import world
from lagom.compat.horovod.autograd import allgather, broadcast_
from lagom.compat.horovod.operations import broadcast_async_, synchronize
from lagom.compat.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Have tensors be those of ``root_rank``, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.

    Raises:
        ValueError: when something else is among them.
    """
    if isinstance(params, Mapping):
        params = sorted(params.items())
    elif isinstance(params, (Tensor, str)) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}; want model.state_dict() or model.named_parameters()")
    pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    for name, value in pairs:
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}, and broadcast_parameters takes tensors; for other objects "
                "there is hvd.broadcast_object, for an optimizer hvd.broadcast_optimizer_state"
            )
    for handle in [broadcast_async_(value, root_rank, name) for name, value in pairs]:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Have the optimizer's state and settings, such as learning rates, be those of ``root_rank``.

    Args:
        model: accepted as in Horovod; there is no need of it.

    Raises:
        ValueError: for LBFGS, whose state is not by parameter.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    shapes = [
        {key: _Shape(value) if isinstance(value, Tensor) else value for key, value in state.items()} for state in states
    ]
    num_params = [len(group["params"]) for group in optimizer.param_groups]
    settings, shapes, theirs = broadcast_object((settings, shapes, num_params), root_rank, "optimizer")
    if theirs != num_params:
        raise ValueError(f"rank {root_rank}'s optimizer has groups of {theirs} parameters, this rank's of {num_params}")
    is_root = world.rank() == root_rank
    if not is_root:
        for group, told in zip(optimizer.param_groups, settings, strict=True):
            group.update(told)
    for at, (parameter, told) in enumerate(zip(parameters, shapes, strict=True)):
        state = states[at] if is_root else {
            key: value.like(states[at].get(key), parameter) if isinstance(value, _Shape) else value
            for key, value in told.items()
        }  # fmt: skip
        for key in sorted(key for key, value in told.items() if isinstance(value, _Shape)):
            broadcast_(state[key], root_rank, f"optimizer.{at}.{key}")
        if not is_root and (state or parameter in optimizer.state):
            optimizer.state[parameter] = state


class _Shape:
    """Stands for a tensor of a state."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"

    def like(self, own: Any, parameter: Tensor) -> Tensor:
        """This rank's tensor for it: its own if that fits."""
        if isinstance(own, Tensor) and (tuple(own.shape), own.dtype) == (self.shape, self.dtype):
            return own
        return torch.zeros(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else parameter.device)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of ``root_rank``, pickled on the way for the others."""
    # Horovod names it by its type, which may differ between ranks: None where only the root has one.
    name = name if name is not None else "object"
    is_root = world.rank() == root_rank
    data = _bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in rank order."""
    name = name if name is not None else "object"
    data = _bytes(obj)
    lengths = allgather(torch.tensor([len(data)]), f"{name}.sz", process_set).tolist()
    parts = allgather(data, f"{name}.t", process_set).split(lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
