"""``PlainLeaves``: tells weights from data among leaves that are not Parameters. See Note [Plain leaves]."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from lagom.errors import DivergenceError, LagomError
from lagom.patching.object_reference import tensor_dictionary
from lagom.run_state.leaves import ACCUMULATE, leaf_of_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import Node

    from lagom.run_state.batch_origin import BatchTracker
    from lagom.run_state.leaves import Leaves
    from lagom.run_state.loader_pass import BatchShare


class Likeness(Enum):
    """Degrees of likeness between a leaf that is not a Parameter and data of a batch."""

    NONE = 0
    ROWS = 1
    """The leaf has as many rows as this rank has samples of the batch: it is data if ranks have different values."""
    SHAPE = 2
    """The leaf has the shape of a tensor of the batch: it is data, even with equal values (a perturbation of zeros)."""


class PlainLeaves:
    """Decides whether leaves with the shape of samples are weights or data of a batch.

    Args:
        leaves: knows the numbers of the leaves that have been trained.
        say_once: logs a text, once.
    """

    def __init__(self, batches: BatchTracker, leaves: Leaves, say_once: Callable[[str], None]) -> None:
        self._batches = batches
        self._leaves = leaves
        self._say_once = say_once
        self._weights = tensor_dictionary()
        self._data = tensor_dictionary()
        """For each leaf that was taken for data, the number of batches seen by then."""

    def examine(self, roots: Sequence[Any], leaves: Sequence[torch.Tensor], share: BatchShare | None) -> None:
        """Find out which ``leaves`` are weights though they look like samples, before a backward frees their graph.

        Raises:
            DivergenceError: when a leaf was taken for data of one batch, and is trained with another batch.
            LagomError: when a leaf may be a weight or data.
        """
        doubtful = []
        for leaf in leaves:
            if isinstance(leaf, torch.nn.Parameter) or leaf in self._weights:
                continue
            if self._data.get(leaf, self._batches.num_batches) != self._batches.num_batches:
                raise DivergenceError(_TRAINED_ON.format(_LIKE_DATA.format(tuple(leaf.shape))))
            is_new = self._leaves.known(leaf) is None and not self._batches.is_sample(leaf)
            if is_new and self.likeness(leaf, share) is Likeness.SHAPE:
                doubtful.append(leaf)
        if not doubtful:
            return
        factors = list(_second_factors(roots))
        for leaf in doubtful:
            others = [other for second, other in factors if second is leaf]
            if others and all(isinstance(other, torch.nn.Parameter) or other is leaf for other in others):
                raise LagomError(_MAY_BE_EITHER.format(_LIKE_DATA.format(tuple(leaf.shape))))
            if others:
                self._weights[leaf] = None
            else:
                self._data[leaf] = self._batches.num_batches
                self._say_once(_TAKEN_FOR_DATA.format(_LIKE_DATA.format(tuple(leaf.shape))))

    def likeness(self, leaf: torch.Tensor, share: BatchShare | None) -> Likeness:
        """Return how closely ``leaf`` resembles this rank's ``share`` of a batch."""
        if share is None or not leaf.dim() or leaf.shape[0] != max(share.num_mine, 1) or leaf in self._weights:
            return Likeness.NONE
        return Likeness.SHAPE if leaf.shape in self._batches.shapes else Likeness.ROWS


def _second_factors(
    roots: Sequence[torch.Tensor | GradientEdge],
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield each leaf that is the right operand of a multiplication in the graph of ``roots``, and its left operand.

    The left operand is None unless it is a leaf too. ``examine`` decides by these pairs: a leaf that multiplies data is
    a weight, and a leaf that multiplies only Parameters may be either.
    """
    pending = [edge.node if isinstance(edge, GradientEdge) else edge.grad_fn for edge in roots]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        operands = [operand for operand, _ in node.next_functions]
        place = _SECOND_FACTOR_AT.get(_kind(node))
        if place is not None and (leaf := _behind_views(operands[place])) is not None:
            yield leaf, _behind_views(operands[place - 1])
        pending += [one for one in operands if one is not None and one not in seen]
        seen.update(operands)


def _behind_views(node: Node | None) -> torch.Tensor | None:
    while node is not None and _kind(node) in _VIEWS:
        node = node.next_functions[0][0]
    return leaf_of_node(node) if node is not None and type(node) is ACCUMULATE else None


def _kind(node: Node) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


_SECOND_FACTOR_AT = {"Mm": 1, "Bmm": 1, "Addmm": 2, "Convolution": 1}
"""Index of the second factor among a node's operands, by the node's name; the first factor comes right before it."""
_VIEWS = {"T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "ReshapeAlias"}
_VIEWS |= {"NumpyT", "MT", "Clone", "ToCopy"}
_LIKE_DATA = "a tensor of shape {} that is no Parameter has the shape of this rank's part of a batch"
_TAKEN_FOR_DATA = "{}: its gradient is taken to be that of this rank's samples; a weight must be a torch.nn.Parameter"
_TRAINED_ON = (
    "{}, so it was taken for a perturbation of that batch, whose gradient is the rank's own. Now it is trained with "
    "another batch. If it is a weight, make it a torch.nn.Parameter; if it belongs to one batch, make a new tensor for "
    "each"
)
_MAY_BE_EITHER = (
    "{}, and multiplies a Parameter, so it may be a weight or belong to the batch. If it is a weight, make it a "
    "torch.nn.Parameter; if it belongs to the batch, use batches='whole'"
)

# Note [Plain leaves]
#
# A leaf that is not a Parameter may be a weight, whose gradient is averaged, or data: samples or a perturbation of
# samples, whose gradient stays the rank's own. Only a leaf with the shape of this rank's samples is in doubt. It is
# data if it is a tensor of the batch. It is a weight if it is the second factor of a product whose first factor is
# neither a Parameter nor the leaf itself. If it is the second factor of other products only, it may be either, which is
# an error. Every other leaf in doubt is taken for data, also one that only autograd nodes missing in
# ``_SECOND_FACTOR_AT`` use. The log says so, and it is an error if the leaf is later trained with another batch.
