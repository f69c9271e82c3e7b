"""``ShardedGradient``: the state of one sharded gradient on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lagom.extensions.zero.partition import ParameterPiece


class GradientPart(NamedTuple):
    """A range of elements of one parameter: rank ``owner`` keeps the gradient of these elements."""

    owner: int
    start: int
    end: int


def parts_of_parameters(pieces: Sequence[Sequence[ParameterPiece]], num_parameters: int) -> list[list[GradientPart]]:
    """Return the parts of each parameter, in rank order, from the pieces that each rank steps."""
    parts: list[list[GradientPart]] = [[] for _ in range(num_parameters)]
    for owner, own in enumerate(pieces):
        for piece in own:
            parts[piece.param].append(GradientPart(owner, piece.start, piece.end))
    return parts


class ShardedGradient:
    """State of one sharded gradient: which rank keeps which part, this rank's shard, whether the gradient is whole."""

    def __init__(self, number: int, parts: list[GradientPart], rank: int) -> None:
        self.number = number
        """Number of the optimizer that steps the parameter; -1 if the gradient was cut before any optimizer's step."""
        self.parts = parts
        self.mine = next((part for part in parts if part.owner == rank), None)
        self.shard: torch.Tensor | None = None
        """This rank's shard of the gradient; None if the shard has no elements, or the gradient is whole or missing."""
        self.is_cut = False
        """Whether this rank has only its shard of the gradient."""
        self.was_shown = False
        """Whether the program has read the gradient since its last cut: it is whole then, at least on this rank."""
        self.shown_version = 0, 0
        """When the program read the gradient: ``GradientShards._clock``, and the version of the whole gradient."""
        self.stays_whole = False
        self.follows_parameter = False
        """Whether the shards are those of the parameter (``zero_lvl=3``), whatever optimizer steps it."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have shards of the gradient. This is equal on all ranks, whichever of them have read it."""
        return self.is_cut or self.was_shown
