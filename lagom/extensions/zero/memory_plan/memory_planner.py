"""``plan_memory``: computes the bytes that each rank needs at each ``zero_lvl``, and which level fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagom.available_memory import AvailableMemory, available_memory
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from lagom.extensions.zero.memory_plan.activations import activations
from lagom.extensions.zero.memory_plan.levels import levels_of
from lagom.extensions.zero.memory_plan.meta_modules import build_module
from lagom.extensions.zero.memory_plan.needs import MemoryPlan
from lagom.extensions.zero.memory_plan.optimizer_state_bytes import SteppedOptimizer, step_meta_copy
from lagom.extensions.zero.optimizer_probe import ShardingKind
from lagom.launch import choose
from lagom.plan import plan
from lagom.world import world_size as ranks_of_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from lagom.config.torch_distributed import MixedPrecision


def plan_memory(
    module: nn.Module | Callable[[], nn.Module],
    *,
    optimizer: Optimizer | Callable[[list[torch.Tensor]], Optimizer] | None = torch.optim.Adam,
    batch: Any = None,
    world_size: int | None = None,
    mixed_precision: MixedPrecision = False,
    memory: float | None = None,
) -> MemoryPlan:
    """Compute how many bytes each rank needs at each ``zero_lvl``, and which level fits.

    The computation uses shapes only: it takes seconds, and does not need that memory.

    Args:
        module: a module, which may be on the meta device and is not changed; or a class or function that makes one.
        optimizer: an optimizer of the module; its class; or a function that makes an optimizer from a list of
            parameters. lagom steps a copy to see its state, and how the state can be sharded. None: no state.
        batch: the module's arguments for one batch of the program: a tensor, a tuple of arguments, or a dict of them.
            Each rank computes its share, and keeps the tensors that autograd saves for the backward. None: activations
            are left out.
        world_size: number of ranks; None: as many as a run would have.
        mixed_precision: as in the config. Parameters, gradients and state keep their size; activations are smaller.
        memory: bytes that a rank may use, such as 40e9; None: the memory of this machine's smallest GPU. Without a GPU
            it is a rank's part of this machine's memory, or of its control group's limit, and at most ``ulimit -v``. If
            executors run on other machines, pass their memory.

    Raises:
        ValueError: if an argument has a wrong value.
        LagomError: inside a run on several ranks; or if ``world_size`` is None, and no run is possible here.
    """
    if ranks_of_run() > 1:
        raise LagomError("plan_memory is called in a run on several ranks; call it before, in the driver or notebook")
    if isinstance(memory, float) and memory.is_integer():
        memory = int(memory)  # 40e6
    _check(world_size, memory)
    TorchDistributedConfig(mixed_precision=mixed_precision)  # raises a ValueError for a wrong setting
    the_module = build_module(module)
    parameters = list({id(p): p for p in the_module.parameters()}.values())
    num_ranks = world_size or _ranks()
    needs = (
        SteppedOptimizer("no optimizer", ShardingKind.ELEMENTWISE, [], [], 0)
        if optimizer is None
        else step_meta_copy(optimizer, parameters)
    )
    dtype = {False: None, "fp16": torch.float16}.get(mixed_precision, torch.bfloat16)
    kept = None if batch is None else activations(the_module, batch, num_ranks, dtype)
    limit = available_memory(num_ranks) if memory is None else AvailableMemory(int(memory), "as you say")
    buffers = sum(b.nbytes for b in the_module.buffers())
    return MemoryPlan(
        module=type(the_module).__name__,
        optimizer=needs.name,
        shared_out=needs.kind.value,
        num_parameters=sum(p.numel() for p in parameters),
        world_size=num_ranks,
        levels=tuple(levels_of([needs], parameters, num_ranks, buffers)),
        activations=None if kept is None else kept.num_bytes,
        num_samples=None if kept is None else kept.num_samples,
        memory=limit.num_bytes,
        where=limit.where,
    )


def _check(world_size: int | None, memory: float | None) -> None:
    for name, value in (("world_size", world_size), ("memory", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            what = "a number of ranks" if name == "world_size" else "a whole number of bytes"
            raise ValueError(f"{name} is {value!r}; want {what}, at least 1, or None")


def _ranks() -> int:
    return plan(TorchDistributedConfig(), choose("auto").cluster()).world_size
