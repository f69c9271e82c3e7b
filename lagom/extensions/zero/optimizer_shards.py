"""``OptimizerShards``: the tensors that a rank steps in place of an optimizer's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lagom.extensions.zero.optimizer_probe import OptimizerFinding, ShardingKind
from lagom.extensions.zero.partition import ParameterPiece, partition_by_element, partition_by_parameter
from lagom.run_state.memory_layout import flatten_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from lagom.exchange.group import Group


class OptimizerShards:
    """Tensors for this rank's pieces of an optimizer's parameters; the optimizer's groups hold them during its step.

    Args:
        parameters: the sharded parameters of the optimizer.
        given: for each parameter that is itself sharded, by its index: start and end of each rank's part, in elements.
        finding: whether parameters are cut into parts, or each assigned to one rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.Tensor],
        given: Mapping[int, Sequence[tuple[int, int]]],
        finding: OptimizerFinding,
        group: Group,
    ) -> None:
        partition = partition_by_element if finding.kind is ShardingKind.ELEMENTWISE else partition_by_parameter
        sizes = [0 if i in given else p.numel() for i, p in enumerate(parameters)]
        self.plain_pieces = partition(sizes, group.world_size)
        """Each rank's pieces of the parameters that are not themselves sharded."""
        self.pieces = [
            sorted([*own, *(ParameterPiece(i, *x[r]) for i, x in given.items() if x[r][0] < x[r][1])])
            for r, own in enumerate(self.plain_pieces)
        ]
        """All pieces of each rank."""
        self.own = [
            (piece, _make_shard(piece, parameters[piece.param], given=piece.param in given))
            for piece in self.pieces[group.rank]
        ]
        """This rank's pieces, each with the tensor to step.

        The tensor is the parameter itself if the piece is all of it, and the parameter is not itself sharded.
        """
        self.partial = [(piece, one) for piece, one in self.own if one is not parameters[piece.param]]
        self.every = [p for group in optimizer.param_groups for p in group["params"]]
        """The optimizer's parameters."""
        shared = {id(p) for p in parameters}
        self.idle = [p for p in self.every if id(p) not in shared]
        """Parameters that are not sharded."""
        lists = {id(p): [p] for p in self.idle}
        for piece, stand_in in self.own:
            lists[id(parameters[piece.param])] = [stand_in]
        self.lists = [[s for p in g["params"] for s in lists.get(id(p), ())] for g in optimizer.param_groups]
        """The tensors that this rank steps, by group of the optimizer."""


def _make_shard(piece: ParameterPiece, parameter: torch.Tensor, *, given: bool) -> torch.Tensor:
    if not given and (piece.start, piece.end) == (0, parameter.numel()):
        return parameter
    # A parameter that is itself sharded gets its memory when it is stepped.
    line = parameter.detach().new_empty(0) if given else flatten_memory(parameter)[piece.start : piece.end]
    kind = nn.Parameter if isinstance(parameter, nn.Parameter) else torch.Tensor
    # Avoid the constructor, since lagom numbers each parameter that is constructed, and the numbers must be equal on
    # all ranks, but each rank makes other stand-ins.
    found: torch.Tensor = torch.Tensor._make_subclass(kind, line, parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found
