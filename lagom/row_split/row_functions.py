"""Slices and gathers rows, with their gradients. See Note [Whole]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from lagom.row_split import whole_batch
from lagom.row_split.row_sharded_tensor import RowShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from lagom.row_split.whole_batch import RowExchange

MIN_BYTES = 2**17
"""Size from which an output stays with the ranks until something looks at it: smaller ones are gathered faster."""


class SliceFunction(Function):
    """This rank's block of a whole tensor; the gradient is gathered and divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: RowExchange, factor: int) -> Tensor:
        ctx.exchange, ctx.factor = exchange, factor
        ctx.postpones = isinstance(whole, RowShardedTensor)
        return _local_rows(whole, exchange, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.postpones and not (torch.is_grad_enabled() and gradient.requires_grad):
            return RowShardedTensor(gradient.detach(), ctx.exchange, ctx.factor, is_gradient=True), None, None
        (whole,) = gather_blocks([gradient], ctx.exchange, [ctx.factor])
        return whole / ctx.exchange.block.world_size, None, None


class GatherFunction(Function):
    """Whole tensors from every rank's block; the gradient is this rank's block, times the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, exchange: RowExchange, factors: Sequence[int], signed: bytes, postpone: bool, *blocks: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.factors = exchange, factors
        ctx.set_materialize_grads(False)
        wholes = _gather(blocks, exchange, factors, signed, postpone=postpone)
        ctx.mark_non_differentiable(*[w for w in wholes if not (w.is_floating_point() or w.is_complex())])
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = [
            None if gradient is None else _gradient_of_rows(gradient, ctx.exchange, factor)
            for gradient, factor in zip(gradients, ctx.factors, strict=True)
        ]
        return (None, None, None, None, *parts)


class ViewFunction(Function):
    """A view of a row-sharded tensor, of which this rank has its rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, source: RowShardedTensor, factor: int, stride: tuple[int, ...]
    ) -> RowShardedTensor:
        ctx.exchange, ctx.factor = source.exchange, factor
        return RowShardedTensor(rows.detach(), source.exchange, factor, source.signed, stride=stride)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradient_of_rows(gradient, ctx.exchange, ctx.factor), None, None, None


def _gradient_of_rows(gradient: Tensor, exchange: RowExchange, factor: int) -> Tensor:
    if isinstance(gradient, RowShardedTensor) and gradient.is_gradient and gradient.has_rows_of(exchange.block, factor):
        return gradient.rows
    return slice_rows(gradient, exchange, factor) * exchange.block.world_size


def gather_blocks(
    blocks: Sequence[Tensor],
    exchange: RowExchange,
    factors: Sequence[int],
    signed: bytes = b"",
    *,
    postpone: bool = False,
) -> Sequence[Tensor]:
    """Return the whole of each of ``blocks``, with a gradient if any block needs one.

    Args:
        factors: of each block, the rows per row of the batch.
        signed: bytes that must be equal on all ranks.
        postpone: whether large ones may be row-sharded, and gathered when something looks at them.
    """
    if torch.is_grad_enabled() and any(block.requires_grad for block in blocks):
        wholes: tuple[Tensor, ...] = GatherFunction.apply(exchange, factors, signed, postpone, *blocks)  # type: ignore[no-untyped-call]
        return wholes
    return _gather(blocks, exchange, factors, signed, postpone=postpone)


def row_sharded_view(
    source: RowShardedTensor, view: Callable[[Tensor], Tensor], rows: Tensor, factor: int, stride: tuple[int, ...]
) -> RowShardedTensor:
    """Return ``view(source)``, of which this rank has ``rows``, ``factor`` for each row of the batch."""
    found: RowShardedTensor
    if torch.is_grad_enabled() and rows.requires_grad:
        found = ViewFunction.apply(rows, source, factor, stride)  # type: ignore[no-untyped-call]
    else:
        found = RowShardedTensor(rows.detach(), source.exchange, factor, source.signed, stride=stride)
    found.record_view(source, view)
    return found


def _gather(
    blocks: Sequence[Tensor], exchange: RowExchange, factors: Sequence[int], signed: bytes, *, postpone: bool
) -> list[Tensor]:
    wholes: dict[int, Tensor] = {}
    least = 0 if whole_batch.ALWAYS else MIN_BYTES
    for i, (block, factor) in enumerate(zip(blocks, factors, strict=True)):
        if postpone and factor * exchange.block.num_all * block[:1].numel() * block.element_size() >= least:
            wholes[i] = RowShardedTensor(block.detach(), exchange, factor, signed)
    now = [i for i in range(len(blocks)) if i not in wholes]
    if now:
        gathered = exchange.gather([blocks[i] for i in now], [factors[i] for i in now], signed)
        wholes.update(zip(now, gathered, strict=True))
    return [wholes[i] for i in range(len(blocks))]


def slice_rows(whole: Tensor, exchange: RowExchange, factor: int = 1) -> Tensor:
    """Return this rank's block of ``whole``, which has ``factor`` rows for each row of the batch.

    It has a gradient if ``whole`` needs one.
    """
    if torch.is_grad_enabled() and whole.requires_grad:
        block: Tensor = SliceFunction.apply(whole, exchange, factor)  # type: ignore[no-untyped-call]
        return block
    return _local_rows(whole, exchange, factor)


def _local_rows(whole: Tensor, exchange: RowExchange, factor: int) -> Tensor:
    if isinstance(whole, RowShardedTensor) and whole.has_rows_of(exchange.block, factor):
        return whole.local_rows()
    return exchange.block.of(whole, factor)


def passes_gather(roots: Iterable[Tensor | GradientEdge]) -> bool:
    """Return whether the graph of ``roots`` passes through a ``GatherFunction``."""
    edges = (root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots)
    pending = [node for node in edges if node is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, GatherFunction._backward_cls):
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return False
