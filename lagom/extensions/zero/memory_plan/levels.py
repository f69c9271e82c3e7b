"""``levels_of``: computes the bytes that a rank holds at each ``zero_lvl``, from the state that optimizers keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lagom.extensions.zero.memory_plan.needs import Level
from lagom.extensions.zero.memory_plan.optimizer_state_bytes import SteppedOptimizer
from lagom.extensions.zero.optimizer_probe import ShardingKind
from lagom.extensions.zero.parameters.shards import MIN_ELEMENTS
from lagom.extensions.zero.partition import ParameterPiece, partition_by_element, partition_by_parameter

if TYPE_CHECKING:
    from collections.abc import Sequence


def levels_of(
    found: Sequence[SteppedOptimizer], parameters: Sequence[torch.Tensor], num_ranks: int, buffers: int = 0
) -> list[Level]:
    """Return the bytes at levels 0 to 3 on the rank that holds most; docs/zero.md says which level shards what.

    Args:
        found: the optimizers, with the bytes of state that each keeps.
        parameters: all parameters of the module, also those that no optimizer steps.
        buffers: bytes of the module's buffers.
    """
    return [_level(zero_lvl, found, parameters, num_ranks, buffers) for zero_lvl in range(4)]


def _level(
    zero_lvl: int, found: Sequence[SteppedOptimizer], parameters: Sequence[torch.Tensor], num_ranks: int, buffers: int
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
        possible=zero_lvl < 3 or all(one.kind is not ShardingKind.BY_PARAMETER for one in found),
    )


def _part(p: torch.Tensor, num_ranks: int) -> int:
    return -(-p.numel() // num_ranks) * p.element_size() if p.numel() >= MIN_ELEMENTS else p.nbytes


def _dealt(one: SteppedOptimizer, zero_lvl: int, num_ranks: int) -> list[list[ParameterPiece]]:
    """Return for each rank the pieces of parameters that the rank steps."""
    sizes = [p.numel() for p in one.parameters]
    if not zero_lvl or one.kind is ShardingKind.COUPLED:
        return [[ParameterPiece(i, 0, size) for i, size in enumerate(sizes)]] * num_ranks
    if one.kind is ShardingKind.BY_PARAMETER:
        return partition_by_parameter(sizes, num_ranks)
    if zero_lvl < 3:
        return partition_by_element(sizes, num_ranks)
    dealt = partition_by_element([0 if size >= MIN_ELEMENTS else size for size in sizes], num_ranks)
    for i, size in enumerate(sizes):
        if size >= MIN_ELEMENTS:  # at level 3 each large parameter is cut into equal chunks by itself
            chunk = -(-size // num_ranks)
            for rank, mine in enumerate(dealt):
                mine.append(ParameterPiece(i, min(rank * chunk, size), min((rank + 1) * chunk, size)))
    return dealt


def _bytes(piece: ParameterPiece, one: SteppedOptimizer) -> int:
    return (piece.end - piece.start) * one.parameters[piece.param].element_size()


def _state(piece: ParameterPiece, one: SteppedOptimizer) -> int:
    kept = one.kept[piece.param]
    return kept.like * (piece.end - piece.start) // max(one.parameters[piece.param].numel(), 1) + kept.rest
