"""What ``torch.autograd.grad`` gives of sliced forwards, averaged over the ranks. See Note [Differentiated]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from lagom.strategies.whole_batch import Gather

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from lagom.collectives.group import Group


def averaged(gradients: Sequence[Tensor | None], group: Group) -> tuple[Tensor | None, ...]:
    """The mean of each over the ranks, differentiably where it is; a collective."""
    there = [gradient for gradient in gradients if gradient is not None]
    means = iter(_Average.apply(group, *there))  # type: ignore[no-untyped-call]
    return tuple(None if gradient is None else next(means) for gradient in gradients)


def passes_gather(roots: Iterable[Tensor | GradientEdge]) -> bool:
    """Whether the graph of ``roots`` goes through what was gathered."""
    edges = (root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots)
    pending = [node for node in edges if node is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, Gather._backward_cls):
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return False


class _Average(Function):
    """The mean over the ranks of gradients that ``torch.autograd.grad`` gives. See Note [Differentiated]."""

    @staticmethod
    def forward(ctx: Any, group: Group, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        averaged = [torch.empty_like(gradient) for gradient in gradients]
        kinds = {(gradient.dtype, gradient.device) for gradient in gradients}
        for kind in sorted(kinds, key=str):
            indices = [i for i, gradient in enumerate(gradients) if (gradient.dtype, gradient.device) == kind]
            flat = torch.cat([gradients[i].reshape(-1) for i in indices])
            group.all_reduce(flat)
            flat /= group.world_size
            for i, part in zip(indices, torch.split(flat, [gradients[i].numel() for i in indices]), strict=True):
                averaged[i].copy_(part.view(gradients[i].shape))
        return tuple(averaged)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *averaged(gradients, ctx.group)


# Note [Differentiated]
#
# ``torch.autograd.grad`` gives gradients to the program at once, which ``backward`` averages first. What it gives of
# a sliced forward's parameters is R times a block's; so it is averaged too, and is whole then. In the backward of such
# an average each rank's part has 1/R of the gradient, times R: the gradient as it is. It is averaged itself, since it
# may come from a sliced forward with these as its parameters (functional_call); the mean of what is whole is the same.
