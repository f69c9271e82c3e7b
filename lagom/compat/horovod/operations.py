"""The exchanges that programs call: in place, asynchronous, grouped; what autograd sees of them is in autograd.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lagom.compat.horovod import asking
from lagom.compat.horovod import process_sets as sets
from lagom.compat.horovod.asking import Average, Sum, asked, grouped, reduction
from lagom.compat.horovod.entry import Entry
from lagom.compat.horovod.process_sets import ProcessSet, global_process_set

_Asked = tuple[ProcessSet, list[Entry], Callable[[list[Entry]], Any]]
_handles: dict[int, _Asked] = {}
"""By handle: what ``synchronize`` waits for, and what it makes of it."""
_numbers = itertools.count()


def begin() -> None:
    """Forget what an earlier world was asked for."""
    _handles.clear()
    asking.begin()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle of the reduction of ``tensor`` over all ranks; ``op`` is ``Average`` if not given."""
    asked = grouped([tensor], name, reduction(op, average), prescale_factor, postscale_factor, process_set, False)
    return _submitted(*asked, _first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``allreduce_async``, in place."""
    asked = grouped([tensor], name, reduction(op, average), prescale_factor, postscale_factor, process_set, True)
    return _submitted(*asked, _first)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """A handle of the reductions of several tensors."""
    asked = grouped(tensors, name, reduction(op, average), prescale_factor, postscale_factor, process_set, False)
    return _submitted(*asked, _all)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``grouped_allreduce_async``, in place."""
    asked = grouped(tensors, name, reduction(op, average), prescale_factor, postscale_factor, process_set, True)
    return _submitted(*asked, _all)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """The sum, or mean, of sparse tensors: to be called, to wait for it. Entries of all ranks stand one behind another.

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
        where, what = synchronize(indices), synchronize(values)
        what = what / (process_set.size() or 1) if op == Average else what
        return torch.sparse_coo_tensor(where.t(), what, tensor.shape, check_invariants=False)

    return wait


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """A handle of all ranks' tensors, one behind the other; first dimensions may differ."""
    return grouped_allgather_async([tensor], name, process_set, _first)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    made: Callable[[list[Entry]], Any] | None = None,
) -> int:
    """As ``allgather_async``, of several."""
    entries = asked("allgather", tensors, name, process_set)
    return _submitted(process_set, entries, made or _all)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle of ``root_rank``'s tensor; it is a rank of all, also in a process set."""
    return _broadcast(tensor, root_rank, name, process_set, False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As ``broadcast_async``, in place."""
    return _broadcast(tensor, root_rank, name, process_set, True)


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A handle of the rows that all ranks have for this one, and of how many each had.

    Args:
        splits: how many rows go to each rank; equally many if not given.
    """
    numbers = tuple(int(one) for one in (splits.tolist() if isinstance(splits, Tensor) else splits or ()))
    entries = asked("alltoall", [tensor], name, process_set, splits=numbers)
    kind = splits.dtype if isinstance(splits, Tensor) else torch.int32

    def made(done: list[Entry]) -> tuple[Tensor, Tensor]:
        assert done[0].result is not None
        return done[0].result, torch.tensor(done[0].received, dtype=kind)

    return _submitted(process_set, entries, made)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """A handle of this rank's rows of the reduced tensor; the first ranks get one more where they do not divide."""
    return grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor, _first)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    made: Callable[[list[Entry]], Any] | None = None,
) -> int:
    """As ``reducescatter_async``, of several."""
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter with op={op!r}; want hvd.Average or hvd.Sum")
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    entries = asked("reducescatter", tensors, name, process_set, False, op=str(op), **factors)
    return _submitted(process_set, entries, made or _all)


def poll(handle: int) -> bool:
    """Whether ``synchronize`` would return at once."""
    asked = _handles.get(handle)
    return asked is None or all(entry.done.is_set() for entry in asked[1])


def synchronize(handle: int) -> Any:
    """What became of an asynchronous exchange, when it is done; None when that was asked before.

    Raises:
        HorovodInternalError: when it failed.
    """
    asked = _handles.pop(handle, None)
    if asked is None:
        return None
    process_set, entries, made = asked
    for entry in entries:
        sets.negotiator(process_set).wait(entry)
    return made(entries)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Until all ranks are here."""
    entries = asked("barrier", [torch.empty(0)], None, process_set)
    synchronize(_submitted(process_set, entries, _all))


def join(device: int = -1) -> int:
    """This rank has no more data: have it contribute zeros to reductions until all ranks are here.

    Means are still of all ranks. Only reductions are possible meanwhile.

    Returns:
        The rank that came last; of several in one round the highest.
    """
    del device
    return sets.negotiator(global_process_set).join()


def _broadcast(tensor: Tensor, root: int, name: str | None, process_set: ProcessSet, in_place: bool) -> int:
    sets.negotiator(process_set)
    if root not in process_set.ranks:
        raise ValueError(f"root_rank is {root}; want one of the ranks {process_set.ranks}")
    entries = asked("broadcast", [tensor], name, process_set, in_place, root=int(root))
    return _submitted(process_set, entries, _first)


def _submitted(process_set: ProcessSet, entries: list[Entry], made: Callable[[list[Entry]], Any]) -> int:
    negotiator = sets.negotiator(process_set)
    for entry in entries:
        negotiator.submit(entry)
    handle = next(_numbers)
    _handles[handle] = process_set, entries, made
    return handle


def _first(entries: list[Entry]) -> Tensor | None:
    return entries[0].result


def _all(entries: list[Entry]) -> list[Tensor | None]:
    return [entry.result for entry in entries]
