"""``find_caveats``: finds losses that are not a plain mean over samples, so that averages over shares are not exact."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lagom.run_state.loss_terms import find_nodes, is_of_batch, root_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.autograd.graph import Node

_SUM = 2
"""torch's number for ``reduction="sum"``."""
_TRANSPARENT = ("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0", "ViewBackward0", "SqueezeBackward0")
"""Nodes between a backward's root and a sum that do not scale it."""


def find_caveats(roots: Sequence[Any]) -> list[str]:
    """Return a warning for each kind of loss in the graph of ``roots`` whose average over shares is not exact.

    Losses that compare samples with each other, or that the program weights by hand, cannot be found in a graph.
    """
    nodes = root_nodes(roots)
    found = []
    if any(_is_weighted(node) for node in find_nodes(nodes) if node.name().startswith("NllLoss")):
        found.append(WEIGHTED)
    if any(map(_is_sum, _first_scaling_nodes(nodes))):
        found.append(SUMMED)
    return found


def _is_weighted(node: Any) -> bool:
    """Return whether a negative log likelihood weights its targets unequally: class weights, or ignored targets.

    Return False if saved tensors may have hooks (checkpoints), since reading them would compute the forward again, or
    if an earlier backward has freed them.
    """
    if node._saved_reduction == 0 or _has_hook(node._raw_saved_total_weight) or _has_hook(node._raw_saved_target):
        return False
    with contextlib.suppress(RuntimeError):  # an earlier backward has freed the saved tensors
        return bool(node._saved_total_weight != node._saved_target.numel())
    return False


def _has_hook(saved: Any) -> bool:
    return getattr(saved, "unpack_hook", "older torch does not tell") is not None


def _first_scaling_nodes(nodes: Iterable[Node | None]) -> list[Node]:
    """Return the first nodes below ``nodes`` that do more than add, stack or reshape."""
    found, pending = [], [node for node in nodes if node is not None]
    while pending:
        node = pending.pop()
        if node.name() in _TRANSPARENT:
            pending += [following for following, _ in node.next_functions if following is not None]
        else:
            found.append(node)
    return found


def _is_sum(node: Node) -> bool:
    """Return whether ``node`` is a sum over a batch of outputs of a model."""
    sums = node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM
    return sums and any(map(is_of_batch, find_nodes([node])))


WEIGHTED = (
    "a loss is a mean with weights of its own (weights of classes, targets that are ignored, as padding is), which sum "
    "up to something else on every rank: with batches='split' gradients are close to those of one process, not equal; "
    "batches='whole' makes them so"
)
SUMMED = (
    "a loss is a sum over a batch: with batches='split' each rank sums up its share, and the average over ranks is "
    "smaller than the sum in one process by the number of ranks; take a mean, or batches='whole'"
)
