"""``plan_memory``: what each rank would hold at each ``zero_lvl``, and which level fits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError, PlanError
from lagom.memory.activations import activations
from lagom.memory.needs import Level, MemoryPlan
from lagom.memory.room import Room, room
from lagom.memory.shapes import built
from lagom.memory.state import Stepped, stepped
from lagom.plan import Cluster, plan
from lagom.strategies.zero.cut import Piece, by_element, by_parameter
from lagom.strategies.zero.probe import Kind
from lagom.worker.place import world_size as ranks_of_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    memory: int | None = None,
) -> MemoryPlan:
    """What a rank would hold at each ``zero_lvl``, and which level fits; from shapes, in seconds, without that memory.

    Args:
        module: a module, which may be on the meta device; a class or a factory. It stays as it is.
        optimizer: one that was made for the module; its class; or a function that makes one of a list of parameters.
            A copy is stepped to see what it keeps, and how that can be shared out. None: no state.
        batch: what the module is called with for one batch of the program: a tensor, a tuple of arguments, or a dict.
            A rank has its share of it, and keeps what autograd saves for the backward.
        world_size: number of ranks; None: as many as a run would have.
        mixed_precision: as in the config. Parameters, gradients and state stay as they are; activations are smaller.
        memory: bytes that a rank may take; None: those of the smallest GPU, or else this machine's (as its control
            group limits it), divided by the ranks. Executors of a cluster may be other machines: say what they have.

    Raises:
        ValueError: when an argument cannot be what it is.
        LagomError: inside of a run on several ranks.
    """
    if ranks_of_run() > 1:
        raise LagomError("plan_memory is called in a run on several ranks; call it before, in the driver or notebook")
    _check(world_size, memory)
    TorchDistributedConfig(mixed_precision=mixed_precision)  # which checks it
    the_module = built(module)
    parameters = list({id(p): p for p in the_module.parameters()}.values())
    num_ranks = world_size or _ranks()
    found = (
        Stepped("no optimizer", Kind.ELEMENTWISE, [], [], 0) if optimizer is None else stepped(optimizer, parameters)
    )
    dtype = {False: None, "fp16": torch.float16}.get(mixed_precision, torch.bfloat16)
    kept = None if batch is None else activations(the_module, batch, num_ranks, dtype)
    limit = room(num_ranks) if memory is None else Room(memory, "as you say")
    buffers = sum(b.nbytes for b in the_module.buffers())
    return MemoryPlan(
        module=type(the_module).__name__,
        optimizer=found.name,
        shared_out=found.kind.value,
        num_parameters=sum(p.numel() for p in parameters),
        world_size=num_ranks,
        levels=tuple(_level(zero_lvl, found, parameters, buffers, num_ranks) for zero_lvl in range(4)),
        activations=None if kept is None else kept.num_bytes,
        num_samples=None if kept is None else kept.num_samples,
        memory=limit.num_bytes,
        where=limit.where,
    )


def _check(world_size: int | None, memory: int | None) -> None:
    for name, value in (("world_size", world_size), ("memory", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            what = "a number of ranks" if name == "world_size" else "bytes"
            raise ValueError(f"{name} is {value!r}; want {what}, at least 1, or None")


def _ranks() -> int:
    from lagom.launchers import choose

    return plan(TorchDistributedConfig(), choose("auto").cluster()).world_size


@functools.cache
def _is_built(zero_lvl: int) -> bool:
    try:
        plan(TorchDistributedConfig(zero_lvl=zero_lvl), Cluster(launcher="local", slots=1))
    except PlanError:
        return False
    return True


def _level(zero_lvl: int, found: Stepped, parameters: Sequence[torch.Tensor], buffers: int, num_ranks: int) -> Level:
    """The rank that holds most; see docs/zero.md for what is cut at which level."""
    deal = by_parameter if found.kind is Kind.BY_PARAMETER else by_element
    sizes = [p.numel() for p in found.parameters]
    apart = zero_lvl > 0 and found.kind is not Kind.COUPLED
    pieces = deal(sizes, num_ranks) if apart else [[Piece(i, 0, size) for i, size in enumerate(sizes)]]
    whole = sum(p.nbytes for p in parameters)
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    shared = sum(p.nbytes for p in found.parameters)
    rows = []
    for mine in pieces:
        own = sum((piece.end - piece.start) * found.parameters[piece.param].element_size() for piece in mine)
        rows.append(
            Level(
                zero_lvl=zero_lvl,
                parameters=whole - shared + own if zero_lvl > 2 else whole,
                buffers=buffers,
                gradients=trained - shared + own if zero_lvl > 1 else trained,
                state=found.whole + sum(_of(piece, found) for piece in mine),
                built=_is_built(zero_lvl),
            )
        )
    return max(rows, key=lambda one: one.held)


def _of(piece: Piece, found: Stepped) -> int:
    kept = found.kept[piece.param]
    return kept.like * (piece.end - piece.start) // max(found.parameters[piece.param].numel(), 1) + kept.rest
