"""From what a program calls to entries with their requests: names, reductions, and what cannot be asked for."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lagom.compat.horovod import process_sets as sets
from lagom.compat.horovod.adasum import is_power_of_two
from lagom.compat.horovod.entry import Entry
from lagom.compat.horovod.matching import REDUCES, Request
from lagom.compat.horovod.process_sets import ProcessSet, global_process_set


class Reduction(str):
    """One of ``Average``, ``Sum``, ``Adasum``, ``Min``, ``Max`` and ``Product``."""

    __slots__ = ()


Average, Sum, Adasum, Min, Max, Product = (Reduction(name) for name in REDUCES)

_names: dict[tuple[Any, str], itertools.count[int]] = {}


def begin() -> None:
    """Count names that are not given from the beginning, in a new world."""
    _names.clear()


def reduction(op: str | None, average: bool | None) -> str:
    """The ``op`` that is meant, with the older ``average`` in its place.

    Raises:
        ValueError: for both, or something else.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is Horovod's older spelling of op=hvd.Average or hvd.Sum", DeprecationWarning, 3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in REDUCES:
        raise ValueError(f"op is {op!r}; want hvd.Average, Sum, Adasum, Min, Max or Product")
    return op


def grouped(
    tensors: Sequence[Tensor],
    name: str | None,
    op: str,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
) -> tuple[ProcessSet, list[Entry]]:
    """The entries of a reduction of ``tensors``."""
    if op == Adasum:
        check_adasum(process_set)
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise ValueError(f"Adasum of {tensors[0].dtype}; want floating-point numbers")
    factors = {"prescale": float(prescale), "postscale": float(postscale)}
    return process_set, asked("allreduce", tensors, name, process_set, in_place, op=str(op), **factors)


def check_adasum(process_set: ProcessSet) -> None:
    """Raise NotImplementedError where there is no adaptive sum of the ranks."""
    if process_set.process_set_id != global_process_set.process_set_id:
        raise NotImplementedError("Adasum is of all ranks; leave process_set out, or use hvd.Average")
    size = process_set.size() or 1
    if not is_power_of_two(size):
        raise NotImplementedError(
            f"Adasum pairs ranks, and pairs of them, so it wants 2, 4, 8, ... ranks, and there are {size}; "
            "run on another number, or use hvd.Average"
        )


def asked(
    kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, in_place: bool = False, **more: Any
) -> list[Entry]:
    """An entry for each of ``tensors``, all of one kind; a name that is not given is counted."""
    if not tensors:
        raise ValueError(f"{kind} of an empty list; want at least one tensor")
    sets.negotiator(process_set)  # first of all: is there one?
    name = name if name is not None else _unnamed(kind, process_set)
    names = [str(name)] if len(tensors) == 1 else [f"{name}.{at}" for at in range(len(tensors))]
    return [
        Entry(_request(kind, one, tensor, more), tensor.detach(), in_place)
        for one, tensor in zip(names, tensors, strict=True)
    ]


def _request(kind: str, name: str, tensor: Tensor, more: dict[str, Any]) -> Request:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{kind} of {name!r}, which is a {type(tensor).__name__}; want a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{kind} of {name!r}, which is sparse; use hvd.sparse_allreduce_async, or tensor.to_dense()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return Request(name, kind, dtype, shape, tensor.element_size(), tensor.device.type, **more)


def _unnamed(kind: str, process_set: ProcessSet) -> str:
    count = _names.setdefault((process_set.process_set_id, kind), itertools.count())
    return f"{kind}.noname.{next(count)}"
