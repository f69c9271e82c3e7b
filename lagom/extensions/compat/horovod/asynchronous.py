"""Exchanges that return a handle at once, in place or not, for one tensor or several; and ``barrier`` and ``join``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lagom.accelerators import current_index
from lagom.extensions.compat.horovod.exchange import Entry
from lagom.extensions.compat.horovod.matching import REDUCTIONS, Request
from lagom.extensions.compat.horovod.negotiation import Negotiator
from lagom.extensions.compat.horovod.process_sets import ProcessSet, global_process_set, negotiator_of


class HorovodReduction(str):
    """One of ``Average``, ``Sum``, ``Adasum``, ``Min``, ``Max`` and ``Product``."""

    __slots__ = ()


Average, Sum, Adasum, Min, Max, Product = (HorovodReduction(name) for name in REDUCTIONS)

_Read = Callable[[list[Entry]], Any]


def _read_all(entries: list[Entry]) -> list[Tensor | None]:
    return [entry.result for entry in entries]


def _read_first(entries: list[Entry]) -> Tensor | None:
    return entries[0].result


@dataclass(eq=False)
class Handle:
    """Exchanges that are under way; ``synchronize`` waits for them."""

    negotiator: Negotiator
    entries: list[Entry]
    read: _Read
    """Turns the finished entries into the result."""
    is_taken: bool = False


def poll(handle: Handle) -> bool:
    """Return whether ``synchronize`` would return at once."""
    return all(entry.done.is_set() for entry in handle.entries)


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous exchange and return its result; None when it was returned before.

    Raises:
        ValueError: when the rows of a rank do not fit its ``splits``.
        HorovodInternalError: when the exchange failed.
    """
    if handle.is_taken:
        return None
    handle.is_taken = True
    for entry in handle.entries:
        handle.negotiator.wait(entry)
    return handle.read(handle.entries)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
    read: _Read = _read_all,
) -> Handle:
    """Start to reduce several tensors over the ranks of ``process_set``.

    Args:
        average: Horovod's older spelling of ``op``: True for ``Average``, False for ``Sum``.
        op: ``Average`` if not given.
        read: turns the finished entries into the result of ``synchronize``.

    Raises:
        ValueError: for a wrong ``op`` or process set, for tensors that cannot be reduced, if an exchange of this name
            is under way, or before ``init``.
        HorovodInternalError: if this rank is not in ``process_set``.
    """
    op = choose_op(op, average)
    if op == Adasum and not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError(f"Adasum of {tensors[0].dtype}; want floating-point numbers")
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _start("allreduce", tensors, name, process_set, read, in_place, op=str(op), **factors)


def grouped_allreduce_async_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Handle:
    """Start to reduce in place; arguments are those of ``grouped_allreduce_async``."""
    return grouped_allreduce_async(tensors, *args, **kwargs, in_place=True)


def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to reduce one tensor; other arguments are those of ``grouped_allreduce_async``."""
    return grouped_allreduce_async([tensor], *args, **kwargs, read=_read_first)


def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to reduce one tensor in place; other arguments are those of ``grouped_allreduce_async``."""
    return grouped_allreduce_async([tensor], *args, **kwargs, in_place=True, read=_read_first)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to add or average sparse tensors; return a function that waits for the result.

    Raises:
        NotImplementedError: for another ``op``.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{op} of the sparse gradient {name!r}; only Average and Sum are there: use sparse_as_dense=True"
        )
    coalesced = tensor.detach().coalesce()
    indices = allgather_async(coalesced.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(coalesced.values(), f"{name}.values", process_set)

    def wait() -> Tensor:
        all_indices, all_values = synchronize(indices), synchronize(values)
        if op == Average:
            all_values = all_values / len(process_set.ranks)
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return wait


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    read: _Read = _read_all,
) -> Handle:
    """Start to concatenate the tensors of all ranks along the first dimension, in which they may differ."""
    return _start("allgather", tensors, name, process_set, read)


def allgather_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to gather one tensor; other arguments are those of ``grouped_allgather_async``."""
    return grouped_allgather_async([tensor], *args, **kwargs, read=_read_first)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
) -> Handle:
    """Start to send the tensor of ``root_rank``, a global rank, to all.

    Raises:
        ValueError: if ``root_rank`` is not in ``process_set``.
    """
    negotiator_of(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank is {root_rank}; want one of the ranks {process_set.ranks}")
    return _start("broadcast", [tensor], name, process_set, _read_first, in_place, root=int(root_rank))


def broadcast_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to broadcast in place; arguments are those of ``broadcast_async``."""
    return broadcast_async(tensor, *args, **kwargs, in_place=True)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to exchange rows; the result is the received rows, and the number of rows from each rank.

    Args:
        splits: number of rows for each rank; equally many if not given.

    Raises:
        ValueError: for ``splits`` that are not whole numbers; if they do not fit the rows, then on all ranks, when they
            wait for the result.
    """
    if isinstance(splits, Tensor) and (splits.is_floating_point() or splits.is_complex()):
        raise ValueError(f"alltoall with splits of {splits.dtype}; want whole numbers, one for each rank")
    numbers = () if splits is None else tuple(map(int, splits.tolist() if isinstance(splits, Tensor) else splits))
    dtype = splits.dtype if isinstance(splits, Tensor) else torch.int32

    def read(entries: list[Entry]) -> tuple[Tensor | None, Tensor]:
        return entries[0].result, torch.tensor(entries[0].received, dtype=dtype)

    return _start("alltoall", [tensor], name, process_set, read, splits=numbers)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    read: _Read = _read_all,
) -> Handle:
    """Start to reduce several tensors; each rank gets its rows, the first ranks one more if the rows do not divide.

    Raises:
        NotImplementedError: for ``Adasum``.
        ValueError: for another ``op`` than ``Average`` and ``Sum``.
    """
    if op == Adasum:
        raise NotImplementedError("reducescatter with op=hvd.Adasum; use hvd.allreduce, and take this rank's rows")
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter with op={op!r}; want hvd.Average or hvd.Sum")
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return _start("reducescatter", tensors, name, process_set, read, False, op=str(op), **factors)


def reducescatter_async(tensor: Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to reduce one tensor; other arguments are those of ``grouped_reducescatter_async``."""
    return grouped_reducescatter_async([tensor], *args, **kwargs, read=_read_first)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks are here."""
    synchronize(_start("barrier", [torch.empty(0)], None, process_set, _read_all))


def join(device: int = -1) -> int:
    """Contribute zeros to reductions until all ranks have joined; means are still those of all ranks.

    Args:
        device: number of the accelerator for zeros of tensors on accelerators; by default this thread's current one.

    Returns:
        The rank that joined last; if several joined in the same round, the highest of them.
    """
    if device < 0:
        device = current_index()
    return negotiator_of(global_process_set).join(device)


def choose_op(op: str | None, average: bool | None) -> str:
    """Return the reduction that ``op`` or the older argument ``average`` asks for; ``Average`` if neither is given.

    Raises:
        ValueError: for both, or an unknown ``op``.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is Horovod's older spelling of op=hvd.Average or hvd.Sum", DeprecationWarning, 4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in REDUCTIONS:
        raise ValueError(f"op is {op!r}; want hvd.Average, Sum, Adasum, Min, Max or Product")
    return op


def _start(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    read: _Read,
    in_place: bool = False,
    **details: Any,
) -> Handle:
    if not tensors:
        raise ValueError(f"{kind} of an empty list; want at least one tensor")
    negotiator = negotiator_of(process_set)
    name = str(name) if name is not None else negotiator.next_name(kind)
    names = [name] if len(tensors) == 1 else [f"{name}.{number}" for number in range(len(tensors))]
    requests = [_request(kind, each, tensor, details) for each, tensor in zip(names, tensors, strict=True)]
    entries = [Entry(request, tensor.detach(), in_place) for request, tensor in zip(requests, tensors, strict=True)]
    for entry in entries:
        negotiator.submit(entry)
    return Handle(negotiator, entries, read)


def _request(kind: str, name: str, tensor: Tensor, details: dict[str, Any]) -> Request:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{kind} of {name!r}, which is a {type(tensor).__name__}; want a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{kind} of {name!r}, which is sparse; use hvd.sparse_allreduce_async, or tensor.to_dense()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Request(name, kind, dtype, tuple(tensor.shape), tensor.element_size(), tensor.device.type, **details)
