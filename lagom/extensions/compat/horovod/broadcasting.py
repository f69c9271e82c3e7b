"""Sends parameters, optimizer states and other objects from one rank to all, or from all to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from lagom.extensions.compat.horovod import topology
from lagom.extensions.compat.horovod.asynchronous import broadcast_async_, synchronize
from lagom.extensions.compat.horovod.differentiable import allgather, broadcast_
from lagom.extensions.compat.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors with those of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.

    Raises:
        ValueError: when ``params`` contains anything but tensors.
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
    """Replace the optimizer's state and settings, such as learning rates, by those of ``root_rank``.

    Args:
        model: accepted as in Horovod, and not used.

    Raises:
        ValueError: for LBFGS, whose state does not belong to single parameters, and when groups differ.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    settings, states, root_sizes = broadcast_object((settings, states, sizes), root_rank, "optimizer")
    if root_sizes != sizes:
        raise ValueError(f"rank {root_rank}'s optimizer has groups of {root_sizes} parameters, this rank's of {sizes}")
    if topology.rank() == root_rank:
        return
    for group, received in zip(optimizer.param_groups, settings, strict=True):
        group.update(received)
    for parameter, state in zip(parameters, states, strict=True):
        if state or parameter in optimizer.state:
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) and not value.is_cpu else value
                for key, value in state.items()
            }


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank``, which travels as a pickle."""
    # Horovod names the exchange by the type of ``obj``; here it has one name, since other ranks may pass None.
    name = name if name is not None else "object"
    is_root = topology.rank() == root_rank
    data = _bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    name = name if name is not None else "object"
    data = _bytes(obj)
    lengths = allgather(torch.tensor([len(data)]), f"{name}.sz", process_set).tolist()
    parts = allgather(data, f"{name}.t", process_set).split(lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
