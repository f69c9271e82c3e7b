"""``LossTermWeights``: weights each term of a loss by this rank's share of the term's batch. See Note [Terms]."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from lagom.run_state.batch_contents import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from lagom.run_state.loader_pass import BatchShare

_KEY = "lagom_share"
_SUMS = ("AddBackward0", "SubBackward0", "StackBackward0")
"""Nodes that add up or stack their inputs, so that each input is a term of its own."""

Gradients = Sequence["torch.Tensor | None"]


class LossTermWeights:
    """Tracks which autograd nodes are a model's outputs for a batch, and weights gradients by the batch's share.

    Args:
        say_once: logs a text unless it was logged before.
    """

    def __init__(self, world_size: int, say_once: Callable[[str], None]) -> None:
        self._world_size = world_size
        self._say_once = say_once
        self._uneven: weakref.WeakSet[_Tag] = weakref.WeakSet()
        self.may_be_uneven = False
        """Whether there may be terms with a weight other than 1."""

    def record_outputs(self, outputs: Any, share: BatchShare) -> None:
        """Record that a model computed ``outputs`` for a batch of which this rank has ``share``."""
        tag = _Tag(share, share.weight(self._world_size))
        if tag.weight != 1.0:
            self._uneven.add(tag)
            self.may_be_uneven = True
        for output in tensors(outputs):
            node = output.grad_fn
            if node is not None:
                metadata(node)[_KEY] = tag

    def weight_gradients(
        self, roots: Sequence[Any], gradients: Gradients, otherwise: float
    ) -> tuple[Gradients, list[RemovableHandle]]:
        """Return the weighted ``gradients`` of ``roots``, and the hooks that weight single terms during the backward.

        Args:
            otherwise: the weight of all roots if their graphs have no output of a model for a known batch. If the roots
                come from batches of different weights, a root without a known batch has weight 1.
        """
        self.may_be_uneven = bool(self._uneven)
        if not self.may_be_uneven and otherwise == 1.0:
            return gradients, []
        nodes = root_nodes(roots)
        below = _find_batch_weights([node for node in nodes if node is not None])
        found = [below[node] if node is not None else _NONE for node in nodes]
        together = frozenset().union(*found)
        if len(together) < 2:
            return _scale_all(gradients, next(iter(together), otherwise)), []
        meeting = [node for node, weights in below.items() if len(weights) > 1 and _num_inputs(node) > 1]
        hooks = [node.register_hook(self._make_hook(node, below)) for node in meeting]
        each = [_single_weight(weights) for weights in found]
        return tuple(_scale(gradient, weight) for gradient, weight in zip(gradients, each, strict=True)), hooks

    def common_weight(self, roots: Sequence[Any], otherwise: float) -> float | None:
        """Return the weight that ``weight_gradients`` gives all terms; None if terms have different weights."""
        if not self._uneven and otherwise == 1.0:
            return 1.0
        below = _find_batch_weights([node for node in root_nodes(roots) if node is not None])
        together = _NONE.union(*below.values())
        return next(iter(together), otherwise) if len(together) < 2 else None

    def _make_hook(self, node: Node, below: dict[Node, frozenset[float]]) -> Callable[..., Any]:
        edges = [
            below.get(following, _NONE) if following is not None else _NONE for following, _ in node.next_functions
        ]
        if node.name() not in _SUMS:
            self._say_once(
                "a loss couples batches of which this rank has unequal shares: its gradient is close to that of one "
                'machine, not equal; batches="whole" makes it so'
            )

        def hook(inputs: Gradients, _: Gradients) -> tuple[torch.Tensor | None, ...]:
            return tuple(_scale(one, _single_weight(weights)) for one, weights in zip(inputs, edges, strict=True))

        return hook


def find_share(tensor: torch.Tensor) -> BatchShare | None:
    """Return the share of the batch for which a model computed ``tensor``; None if it is unknown."""
    node = tensor.grad_fn
    if node is None:
        return None
    tag: _Tag | None = metadata(node).get(_KEY)
    return None if tag is None else tag.share


class _Tag:
    """A share and its weight, kept in a node's metadata, and so alive as long as the graph."""

    __slots__ = ("__weakref__", "share", "weight")

    def __init__(self, share: BatchShare, weight: float) -> None:
        self.share = share
        self.weight = weight


def metadata(node: Node) -> dict[str, Any]:
    """Return the dict that autograd keeps with ``node`` as long as the graph lives."""
    found: Any = node.metadata  # a property, but torch's type stubs declare a method
    return found  # type: ignore[no-any-return]


def is_of_batch(node: Node) -> bool:
    """Return whether ``node`` has computed a model's output for a known batch."""
    return _KEY in metadata(node)


def root_nodes(roots: Sequence[Any]) -> list[Node | None]:
    """Return the nodes of the graph where a backward from ``roots`` begins."""
    return [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]


def find_nodes(roots: Sequence[Node | None]) -> set[Node]:
    """Return all nodes of the graph that a backward from ``roots`` reaches."""
    found: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions]
    return found


_NONE: frozenset[float] = frozenset()


def _find_batch_weights(roots: list[Node]) -> dict[Node, frozenset[float]]:
    """Return, for each node, the weights of the batches below it; the walk stops at outputs of models."""
    weights_of_node: dict[Node, frozenset[float]] = {}
    pending = [(root, False) for root in roots]
    while pending:
        node, is_done = pending.pop()
        following = [child for child, _ in node.next_functions if child is not None]
        if is_done:
            weights_of_node[node] = _NONE.union(*(weights_of_node[child] for child in following))
        elif node not in weights_of_node:
            tag = metadata(node).get(_KEY)
            weights_of_node[node] = _NONE if tag is None else frozenset((tag.weight,))
            if tag is None:
                pending.append((node, True))
                pending.extend((child, False) for child in following if child not in weights_of_node)
    return weights_of_node


def _num_inputs(node: Node) -> int:
    return sum(following is not None for following, _ in node.next_functions)


def _single_weight(weights: frozenset[float]) -> float:
    """Return the only weight; 1 if there is none, or if there are several, which hooks apply further down."""
    return next(iter(weights)) if len(weights) == 1 else 1.0


def _scale_all(gradients: Gradients, weight: float) -> Gradients:
    return gradients if weight == 1.0 else tuple(_scale(gradient, weight) for gradient in gradients)


def _scale(gradient: torch.Tensor | None, weight: float) -> torch.Tensor | None:
    return gradient if gradient is None or weight == 1.0 else gradient * weight


class ExchangeFunction(Function):
    """A function whose backward exchanges gradients with the other ranks, and so cannot be part of a batched call."""

    gives_whole = True
    """Whether its inputs get gradients of the whole batch; if not, they get those of this rank's samples."""


def find_exchanges(roots: Sequence[torch.Tensor | GradientEdge]) -> set[type[ExchangeFunction]]:
    """Return the classes of the ``ExchangeFunction`` in the graph of ``roots``."""
    kinds: set[Any] = {getattr(type(node), "_forward_cls", object) for node in find_nodes(root_nodes(roots))}
    return {kind for kind in kinds if issubclass(kind, ExchangeFunction)}


# Note [Terms]
#
# The gradient at the root of a backward is multiplied by the weight of this rank's share of the batch, so that averages
# over the ranks are means over the batch. A loss may come from several batches: two zipped loaders, or losses summed
# over an epoch. If their shares differ in weight (in a tail), each term needs its own weight. This is possible for
# terms that are added up: the graph is walked from the root to the outputs of models, each of which has a tag with its
# batch's share. At every node where terms of different weights meet, the gradient of each term is multiplied by the
# weight of its batch. A term without a batch (weight decay) has weight 1. If batches are combined in another way (a
# contrastive loss), no weight is right, and the user is warned.
#
# The walk is needed only while the graph of an uneven share is alive, or if the batch that the program has fetched last
# is uneven: the loss may be of an earlier one. A tag is in the metadata of a node of the graph, so it lives as long as
# the graph. Otherwise all terms have weight 1, which needs no walk.


_SUM = 2
"""torch's number for ``reduction="sum"``."""
_TRANSPARENT = ("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0", "ViewBackward0", "SqueezeBackward0")
"""Nodes between a backward's root and a sum that do not scale it."""


def find_caveats(roots: Sequence[Any]) -> list[str]:
    """Return a warning for each kind of loss in the graph of ``roots`` whose average over shares is not exact.

    Losses that compare samples with each other, or that the program weights by hand, cannot be found in a graph.
    """
    nodes = root_nodes(roots)
    caveats = []
    if any(_is_weighted(node) for node in find_nodes(nodes) if node.name().startswith("NllLoss")):
        caveats.append(WEIGHTED)
    if any(map(_is_sum, _first_scaling_nodes(nodes))):
        caveats.append(SUMMED)
    return caveats


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
