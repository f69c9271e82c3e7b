"""``ExchangeFunction``: an autograd function whose backward exchanges something with the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd import Function

from lagom.run_state.loss_terms import find_nodes, root_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.autograd.graph import GradientEdge


class ExchangeFunction(Function):
    """A function whose backward exchanges gradients with the other ranks, and so cannot be part of a batched call."""

    gives_whole = True
    """Whether its inputs get gradients of the whole batch; if not, they get those of this rank's samples."""


def find_exchanges(roots: Sequence[Tensor | GradientEdge]) -> set[type[ExchangeFunction]]:
    """Return the classes of the ``ExchangeFunction`` in the graph of ``roots``."""
    kinds: set[Any] = {getattr(type(node), "_forward_cls", object) for node in find_nodes(root_nodes(roots))}
    return {kind for kind in kinds if issubclass(kind, ExchangeFunction)}
