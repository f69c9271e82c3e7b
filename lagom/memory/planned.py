"""``plan_memory``: what each rank would hold at each ``zero_lvl``, and which level fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from lagom.memory.activations import activations
from lagom.memory.needs import Level, MemoryPlan
from lagom.memory.room import Room, room
from lagom.memory.shapes import built
from lagom.memory.state import Stepped, stepped
from lagom.plan import plan
from lagom.strategies.zero.cut import Piece, by_element, by_parameter
from lagom.strategies.zero.probe import Kind
from lagom.strategies.zero.weights import LEAST
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
        levels=tuple(levels_of([found], parameters, num_ranks, buffers)),
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


def levels_of(
    found: Sequence[Stepped], parameters: Sequence[torch.Tensor], num_ranks: int, buffers: int = 0
) -> list[Level]:
    """Each level, of the rank that holds most; docs/zero.md says what is cut at which.

    Args:
        found: of each optimizer.
        parameters: also those that no optimizer steps.
    """
    return [_level(zero_lvl, found, parameters, num_ranks, buffers) for zero_lvl in range(4)]


def _level(
    zero_lvl: int, found: Sequence[Stepped], parameters: Sequence[torch.Tensor], num_ranks: int, buffers: int
) -> Level:
    shared = {id(p) for one in found for p in one.parameters}
    held = sum(_part(p, num_ranks) if zero_lvl > 2 else p.nbytes for p in parameters)
    trained = sum(p.nbytes for p in parameters if p.requires_grad and id(p) not in shared)
    rows = [[held, trained, 0] for _ in range(num_ranks)]
    for one in found:
        for row, mine in zip(rows, _dealt(one, zero_lvl, num_ranks), strict=True):
            own = sum(_bytes(piece, one) for piece in mine)
            row[1] += own if zero_lvl > 1 else sum(p.nbytes for p in one.parameters)
            row[2] += one.whole + sum(_state(piece, one) for piece in mine)
    most = max(rows, key=sum)
    return Level(
        zero_lvl=zero_lvl,
        parameters=most[0],
        buffers=buffers,
        gradients=most[1],
        state=most[2],
        possible=zero_lvl < 3 or all(one.kind is not Kind.BY_PARAMETER for one in found),
    )


def _part(p: torch.Tensor, num_ranks: int) -> int:
    return -(-p.numel() // num_ranks) * p.element_size() if p.numel() >= LEAST else p.nbytes


def _dealt(one: Stepped, zero_lvl: int, num_ranks: int) -> list[list[Piece]]:
    """What each rank steps."""
    sizes = [p.numel() for p in one.parameters]
    if not zero_lvl or one.kind is Kind.COUPLED:
        return [[Piece(i, 0, size) for i, size in enumerate(sizes)]] * num_ranks
    if one.kind is Kind.BY_PARAMETER:
        return by_parameter(sizes, num_ranks)
    if zero_lvl < 3:
        return by_element(sizes, num_ranks)
    dealt = by_element([0 if size >= LEAST else size for size in sizes], num_ranks)
    for i, size in enumerate(sizes):
        if size >= LEAST:  # each of these is cut by itself
            chunk = -(-size // num_ranks)
            for rank, mine in enumerate(dealt):
                mine.append(Piece(i, min(rank * chunk, size), min((rank + 1) * chunk, size)))
    return dealt


def _bytes(piece: Piece, one: Stepped) -> int:
    return (piece.end - piece.start) * one.parameters[piece.param].element_size()


def _state(piece: Piece, one: Stepped) -> int:
    kept = one.kept[piece.param]
    return kept.like * (piece.end - piece.start) // max(one.parameters[piece.param].numel(), 1) + kept.rest
