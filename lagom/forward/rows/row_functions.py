"""Autograd functions that slice and gather rows, and a search for gathers in the graph of a loss.

See Note [Whole].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from lagom.forward.rows import whole_batch
from lagom.run_state.loss_terms import ExchangeFunction, find_nodes, root_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lagom.forward.rows.whole_batch import Orders, RowExchange


MIN_LOSS_BYTES = 2**17
"""Bytes of scores from which sharing out their loss saves more time than an exchange takes."""


class SliceFunction(ExchangeFunction):
    """This rank's block of a whole tensor; the gradient is gathered and divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: RowExchange, factor: int) -> Tensor:
        ctx.exchange, ctx.factor = exchange, factor
        return exchange.block.of(whole, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = gather_blocks([gradient], ctx.exchange, [ctx.factor])
        ctx.exchange.gatherer.clock.divide_backward(False)
        return whole / ctx.exchange.block.world_size, None, None


class GatherFunction(ExchangeFunction):
    """Whole tensors from every rank's block; the gradient is this rank's block, times the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: RowExchange,
        factors: Sequence[int],
        signed: bytes,
        orders: Orders,
        ends: Sequence[Tensor],
        *blocks: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.factors, ctx.block_ends, ctx.is_watched = exchange, factors, ends, False
        ctx.set_materialize_grads(False)
        wholes = exchange.gather(blocks, factors, signed, orders)
        ctx.mark_non_differentiable(*[w for w in wholes if not (w.is_floating_point() or w.is_complex())])
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange.gatherer.clock.divide_backward(True)
        parts = [
            None if g is None else slice_rows(g, exchange, factor) * exchange.block.world_size
            for g, factor in zip(gradients, ctx.factors, strict=True)
        ]
        return (None, None, None, None, None, *parts)


class EndFunction(Function):
    """Makes a placeholder for ``block`` in the graph, without memory, whose gradient goes to ``block``."""

    @staticmethod
    def forward(ctx: Any, block: Tensor) -> Tensor:
        return block.new_zeros(()).expand(block.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def gather_blocks(
    blocks: Sequence[Tensor], exchange: RowExchange, factors: Sequence[int], signed: bytes = b"", orders: Orders = ()
) -> Sequence[Tensor]:
    """Gather the whole tensor of each of ``blocks``; a collective. The results need gradients if any block does.

    The arguments are those of ``Gatherer.gather`` in whole_batch.py.
    """
    if torch.is_grad_enabled() and any(block.requires_grad for block in blocks):
        rows = exchange.block
        most = max(block.numel() // rows.num_mine * rows.num_all for block in blocks)  # the same on all ranks
        ends: list[Tensor] = []
        if 8 * most >= MIN_LOSS_BYTES or whole_batch.ALWAYS:
            ends = [EndFunction.apply(block) for block in blocks]  # type: ignore[no-untyped-call]
        wholes: tuple[Tensor, ...] = GatherFunction.apply(exchange, factors, signed, orders, ends, *blocks)  # type: ignore[no-untyped-call]
        return wholes
    return exchange.gather(blocks, factors, signed, orders)


def slice_rows(whole: Tensor, exchange: RowExchange, factor: int = 1) -> Tensor:
    """Return this rank's block of ``whole``, which has ``factor`` rows for each row of the batch.

    The block needs a gradient if ``whole`` does.
    """
    if torch.is_grad_enabled() and whole.requires_grad:
        block: Tensor = SliceFunction.apply(whole, exchange, factor)  # type: ignore[no-untyped-call]
        return block
    return exchange.block.of(whole, factor)


def is_batched(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is wrapped by torch.func (``vmap``, ``grad``), or batched by ``is_grads_batched``."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or "Batched" in str(torch._C._dispatch_keys(tensor))


def passes_gather(roots: Sequence[Tensor | GradientEdge]) -> bool:
    """Return whether the graph of ``roots`` passes through a ``GatherFunction``."""
    return any(isinstance(node, GatherFunction._backward_cls) for node in find_nodes(root_nodes(roots)))


# Note [Whole]
#
# The program sees whole batches and whole outputs, equal on all ranks, so everything that it computes from them is
# equal too: any loss, any metric, any branch. Inside the forward of a module, and nowhere else in the program, a rank
# has only its block of the rows. (Inside torch's losses it may, too: see Note [Losses by rows] in row_losses.py.)
#
# With R ranks, write g for the gradient of one process. A whole tensor has the gradient g on every rank. A block has
# the gradient R g: the gradient of a parameter on a rank covers its block's part of the sum over rows, so the average
# over the ranks is the sum of one process. So the gradient of a gather is the block of g, times R, and the gradient of
# a slice is the gathered gradient, divided by R. Parameters that the program uses outside a sliced forward (weight
# decay in the loss) have g on every rank, and the average is g. Two forwards in a row pass whole tensors on. BatchNorm
# in a sliced forward sees the same factor on all ranks; see Note [BatchNorm] in forward/batchnorm_arithmetic.py. Both
# operations are linear, and each is the other's gradient, so second gradients are right as well: with S for a slice and
# G for a gather, the gradient of R S(g) is R G(v) / R.
