"""Exchanges that wait and return tensors, with the gradients that Horovod gives them. See Note [Gradients]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lagom.extensions.compat.horovod import asynchronous, topology
from lagom.extensions.compat.horovod.asynchronous import Average, Sum, choose_op, synchronize
from lagom.extensions.compat.horovod.compression import Compression
from lagom.extensions.compat.horovod.process_sets import ProcessSet, global_process_set


class _DifferentiableExchange(torch.autograd.Function):
    """Calls one function forwards and one backwards; both take and return sequences of tensors."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, differentiate: Any, *tensors: Any) -> Any:
        ctx.differentiate = differentiate
        return tuple(exchange(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, *ctx.differentiate(grads))


_OfTensors = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _apply(exchange: _OfTensors, differentiate: _OfTensors, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(_DifferentiableExchange.apply(exchange, differentiate, *tensors))  # type: ignore[no-untyped-call]


def _apply_compressed(
    compression: Any, exchange: _OfTensors, differentiate: _OfTensors, tensors: Sequence[Tensor]
) -> list[Tensor]:
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = _apply(exchange, differentiate, [tensor for tensor, _ in compressed])
    return [compression.decompress(one, context) for one, (_, context) in zip(results, compressed, strict=True)]


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
    """Return the reductions of several tensors over all ranks; ``op`` is ``Average`` if not given."""
    op = choose_op(op, average)
    settings: Any = {
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }

    def exchange(given: Sequence[Tensor]) -> Any:
        return synchronize(asynchronous.grouped_allreduce_async(given, name=name, **settings))

    def differentiate(grads: Sequence[Tensor]) -> list[Tensor]:
        if op not in (Average, Sum):
            raise NotImplementedError(
                f"the gradient of allreduce with op={op!r}: Horovod reduces gradients by the same op, which is not the "
                "gradient; use hvd.Average or hvd.Sum, or detach() the tensor before"
            )
        return grouped_allreduce(grads, **settings)

    return _apply_compressed(compression, exchange, differentiate, tensors)


def allreduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce one tensor; other arguments are those of ``grouped_allreduce``."""
    return grouped_allreduce([tensor], *args, **kwargs)[0]


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Reduce in place, unseen by autograd; arguments are those of ``grouped_allreduce_async``."""
    synchronize(asynchronous.grouped_allreduce_async_(tensors, *args, **kwargs))
    return list(tensors)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce one tensor in place, unseen by autograd; other arguments are those of ``grouped_allreduce_async``."""
    return grouped_allreduce_([tensor], *args, **kwargs)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return the concatenated tensors of all ranks, in rank order; first dimensions may differ."""
    num_rows = [len(tensor) if tensor.dim() else 0 for tensor in tensors]

    def exchange(given: Sequence[Tensor]) -> Any:
        return synchronize(asynchronous.grouped_allgather_async(given, name, process_set))

    def differentiate(grads: Sequence[Tensor]) -> list[Tensor]:
        means = grouped_allreduce(grads, op=Average, process_set=process_set)
        all_rows = allgather(torch.tensor([num_rows]), process_set=process_set)
        starts = all_rows[: process_set.rank()].sum(0).tolist()
        return [mean.narrow(0, start, num) for mean, start, num in zip(means, starts, num_rows, strict=True)]

    return _apply(exchange, differentiate, tensors)


def allgather(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Gather one tensor; other arguments are those of ``grouped_allgather``."""
    return grouped_allgather([tensor], *args, **kwargs)[0]


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of ``root_rank``."""

    def exchange(given: Sequence[Tensor]) -> Any:
        return [synchronize(asynchronous.broadcast_async(given[0], root_rank, name, process_set))]

    def differentiate(grads: Sequence[Tensor]) -> list[Tensor]:
        mean = allreduce(grads[0], op=Average, process_set=process_set)
        return [mean if topology.rank() == root_rank else torch.zeros_like(mean)]

    return _apply(exchange, differentiate, [tensor])[0]


def broadcast_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Broadcast in place, unseen by autograd; arguments are those of ``broadcast``."""
    synchronize(asynchronous.broadcast_async_(tensor, *args, **kwargs))
    return tensor


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows that all ranks have for this rank; with ``splits`` also the number of rows from each rank."""
    received: list[Tensor] = []

    def exchange(given: Sequence[Tensor]) -> list[Tensor]:
        rows, numbers = synchronize(asynchronous.alltoall_async(given[0], splits, name, process_set))
        received.append(numbers)
        return [rows]

    def differentiate(grads: Sequence[Tensor]) -> list[Tensor]:
        return [alltoall(grads[0], received[0], process_set=process_set)[0]]

    (rows,) = _apply(exchange, differentiate, [tensor])
    return rows if splits is None else (rows, received[0])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of several reduced tensors."""

    def exchange(given: Sequence[Tensor]) -> Any:
        settings = (op, process_set, prescale_factor, postscale_factor)
        return synchronize(asynchronous.grouped_reducescatter_async(given, name, *settings))

    def differentiate(grads: Sequence[Tensor]) -> list[Tensor]:
        factor = prescale_factor * postscale_factor * (len(process_set.ranks) if op == Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], process_set=process_set)

    return _apply_compressed(compression, exchange, differentiate, tensors)


def reducescatter(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Reduce one tensor; other arguments are those of ``grouped_reducescatter``."""
    return grouped_reducescatter([tensor], *args, **kwargs)[0]


# Note [Gradients]
#
# Gradients have the same numbers as in Horovod. The gradient of an allreduce by Average or Sum is the allreduce of the
# gradients by the same op. For Min, Max, Product and Adasum that would not be the gradient, so the backward raises
# NotImplementedError. The gradient of an allgather or a broadcast is the mean over the ranks, although the derivative
# of the losses of all ranks together would be the sum: programs for Horovod have learning rates that fit the mean.
