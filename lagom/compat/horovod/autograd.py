"""The exchanges that return a tensor: with the gradients that Horovod gives them. See Note [Gradients]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagom.compat.horovod import asking, operations, world
from lagom.compat.horovod.asking import Adasum, Average, Max, Min, Product, Sum, reduction
from lagom.compat.horovod.compression import Compression
from lagom.compat.horovod.operations import synchronize
from lagom.compat.horovod.process_sets import ProcessSet, global_process_set


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction of ``tensor`` over all ranks; ``op`` is ``Average`` if not given."""
    asked = (reduction(op, average), prescale_factor, postscale_factor, process_set)
    sent, context = compression.compress(tensor)
    (came,) = _apply(_AllReduce, name, *asked, sent)
    return compression.decompress(came, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The reductions of several tensors."""
    asked = (reduction(op, average), prescale_factor, postscale_factor, process_set)
    sent, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    came = _apply(_AllReduce, name, *asked, *sent)
    return [compression.decompress(one, context) for one, context in zip(came, contexts, strict=True)]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As ``allreduce``, in place; autograd does not see it."""
    given = (tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    synchronize(operations.allreduce_async_(*given))
    return tensor


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As ``grouped_allreduce``, in place; autograd does not see it."""
    given = (tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    synchronize(operations.grouped_allreduce_async_(*given))
    return list(tensors)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' tensors, one behind the other in rank order; their first dimensions may differ."""
    found: Tensor = _apply(_AllGather, name, process_set, tensor)[0]
    return found


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As ``allgather``, of several."""
    return list(_apply(_AllGather, name, process_set, *tensors))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of ``root_rank``."""
    found: Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return found


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """As ``broadcast``, in place; autograd does not see it."""
    synchronize(operations.broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The rows that all ranks have for this one; with ``splits`` also how many each had."""
    rows, received = _apply(_AllToAll, tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduced tensor."""
    given = ([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter(*given)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As ``reducescatter``, of several."""
    sent, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    came = _apply(_ReduceScatter, name, op, process_set, prescale_factor, postscale_factor, *sent)
    return [compression.decompress(one, context) for one, context in zip(came, contexts, strict=True)]


def _apply(function: Any, *given: Any) -> Any:
    return function.apply(*given)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.asked = op, prescale, postscale, process_set
        asked = asking.grouped(tensors, name, op, prescale, postscale, process_set, False)
        return tuple(synchronize(operations._submitted(*asked, operations._all)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, prescale, postscale, process_set = ctx.asked
        if op in (Min, Max, Product, Adasum):
            raise NotImplementedError(
                f"the gradient of allreduce with op={op!r}: Horovod reduces gradients by the same op, which is not the "
                "gradient; use hvd.Average or hvd.Sum, or detach() the tensor before"
            )
        reduced = grouped_allreduce(
            list(grads), op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        )
        return (None, None, None, None, None, *reduced)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.rows = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        return tuple(synchronize(operations.grouped_allgather_async(list(tensors), name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        reduced = grouped_allreduce(list(grads), op=Average, process_set=ctx.process_set)
        rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        before = rows[: ctx.process_set.rank()].sum(0).tolist()
        parts = [grad.narrow(0, start, num) for grad, start, num in zip(reduced, before, ctx.rows, strict=True)]
        return (None, None, *parts)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, root: Any, name: Any, process_set: Any) -> Any:
        ctx.asked = root, process_set
        return synchronize(operations.broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        root, process_set = ctx.asked
        reduced = allreduce(grads[0], op=Average, process_set=process_set)
        return reduced if world.rank() == root else torch.zeros_like(reduced), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        rows, received = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.asked = received, process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        received, process_set = ctx.asked
        return alltoall(grads[0], received, process_set=process_set)[0], None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, process_set: Any, prescale: Any, postscale: Any, *tensors: Any) -> Any:
        ctx.asked = op, process_set, prescale * postscale
        given = (list(tensors), name, op, process_set, prescale, postscale)
        return tuple(synchronize(operations.grouped_reducescatter_async(*given)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, process_set, factor = ctx.asked
        factor = factor * (process_set.size() if op == Sum else 1)
        whole = grouped_allgather([grad * factor for grad in grads], process_set=process_set)
        return (None, None, None, None, None, *whole)


# Note [Gradients]
#
# They are Horovod's, numbers included: the gradient of an allreduce is the gradients' allreduce by the same op; that of
# an allgather or a broadcast is the mean over the ranks, where the derivative of what all ranks' losses are together
# would be the sum. Programs have learning rates that go with it.
