"""``GradientPath``: the operations between an output of a sliced forward and a tensor that has its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lagom.forward.rows.row_functions import GatherFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Shape = tuple[int, ...]
    Step = Callable[[Tensor, Shape], Tensor]

_GATHER: Any = GatherFunction._backward_cls
_MAX_STEPS = 16


@dataclass(frozen=True, eq=False)
class GradientPath:
    """The operations between an output of a sliced forward and a tensor; each keeps the rows of a sample together.

    Args:
        gather: the ``GatherFunction`` in the graph.
        index: position of the output among the outputs of ``gather``.
        factor: rows of the tensor for each row of the batch.
        steps: for each operation, last first: the shape of its input, and the function that turns the gradient of its
            output into the gradient of its input; None if the gradient is only reshaped.
    """

    gather: Any
    index: int
    factor: int
    steps: tuple[tuple[Shape, Step | None], ...]

    def gradient_of_block(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's block of the output, given the ``gradient`` of its rows of the tensor."""
        block = self.gather.exchange.block
        for shape, step in self.steps:
            mine = (shape[0] // block.num_all * block.num_mine, *shape[1:])
            gradient = gradient.reshape(mine) if step is None else step(gradient, mine)
        return gradient.to(self.gather.block_ends[self.index])


def find_gradient_path(tensor: Tensor) -> GradientPath | None:
    """Return the path to ``tensor`` from an output of a sliced forward; None if no known steps lead there."""
    node: Any = tensor.grad_fn
    index, shape = tensor.output_nr, tuple(tensor.shape)
    shapes: list[Shape] = [shape]
    steps: list[tuple[Shape, Step | None]] = []
    casts = 0
    while node is not None and not isinstance(node, _GATHER):
        inverse = _invert(node, shapes[-1]) if len(steps) < _MAX_STEPS else None
        if inverse is None:
            return None
        shapes.append(inverse[0])
        steps.append(inverse)
        casts += node.name() == "ToCopyBackward0"
        node, index = node.next_functions[0]
    # A small output has no block ends, though the program may have made a large tensor of it, by expand().
    num_all = node.exchange.block.num_all if node is not None and node.block_ends else 0
    if casts > 1:  # the gradient may be rounded between two casts
        return None
    if not num_all or not all(shape and shape[0] and shape[0] % num_all == 0 for shape in shapes):
        return None
    return GradientPath(node, index, shape[0] // num_all, tuple(steps))


def watch_gradient(node: Any) -> None:
    """Mark the sliced forward that ``node`` leads to: gradients that pass ``node`` must be as in one process.

    Args:
        node: a node of the graph, or None; nothing is marked if it leads to no sliced forward.
    """
    for _ in range(_MAX_STEPS + 1):
        if isinstance(node, _GATHER):
            node.is_watched = True
        if node is None or not node.next_functions:
            return
        node = node.next_functions[0][0]  # an operation on a path has one input


def _invert(node: Any, shape: Shape) -> tuple[Shape, Step | None] | None:
    """Return the shape of an operation's input, and the function for its gradient; None if it may mix samples.

    An operation that keeps the order of elements (a view or a copy) has no function: its gradient is reshaped.
    """
    kind = node.name()
    if kind in _VIEWS:
        before = tuple(node._saved_self_sym_sizes)
        return (before, None) if math.prod(before) == math.prod(shape) else None
    if kind in ("CloneBackward0", "AliasBackward0", "ToCopyBackward0"):
        return shape, None
    if kind == "UnsqueezeBackward0":
        dim = _signed(node._saved_dim) % len(shape)
        return (*shape[:dim], *shape[dim + 1 :]), None
    make = _OTHERS.get(kind)
    return None if make is None else make(node, shape)


def _transpose(node: Any, shape: Shape) -> tuple[Shape, Step] | None:
    one, other = (_signed(dim) % len(shape) for dim in (node._saved_dim0, node._saved_dim1))
    dims = list(range(len(shape)))
    dims[one], dims[other] = other, one
    return _permuted(dims, shape)


def _permute(node: Any, shape: Shape) -> tuple[Shape, Step] | None:
    return _permuted([_signed(dim) % len(shape) for dim in node._saved_dims], shape)


def _permuted(dims: list[int], shape: Shape) -> tuple[Shape, Step] | None:
    if dims[0]:
        return None
    back = [dims.index(dim) for dim in range(len(dims))]
    return tuple(shape[dim] for dim in back), lambda gradient, mine: gradient.permute(back)


def _slice(node: Any, shape: Shape) -> tuple[Shape, Step] | None:
    before = tuple(node._saved_self_sym_sizes)
    dim = _signed(node._saved_dim) % len(before)
    start, end, step = _signed(node._saved_start or 0), node._saved_end, node._saved_step
    end = before[dim] if end is None else _signed(end)
    if not dim:
        return None
    return before, lambda gradient, mine: torch.ops.aten.slice_backward(gradient, mine, dim, start, end, step)


def _select(node: Any, shape: Shape) -> tuple[Shape, Step] | None:
    before = tuple(node._saved_self_sym_sizes)
    dim, index = _signed(node._saved_dim) % len(before), _signed(node._saved_index)
    if not dim:
        return None
    return before, lambda gradient, mine: torch.ops.aten.select_backward(gradient, mine, dim, index)


def _signed(number: int) -> int:
    """Return the signed value of a number that autograd's nodes show as an unsigned 64-bit integer."""
    return number - 2**64 if number >= 2**63 else number


_VIEWS = frozenset(
    (
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
    )
)
"""Operations that keep the order of elements, if they also keep the number of elements."""
_OTHERS: dict[str, Callable[[Any, Shape], tuple[Shape, Step] | None]] = {
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "SliceBackward0": _slice,
    "SelectBackward0": _select,
}
