"""Conversions of the arguments of torch's process groups into plain values: tensors, roots and reductions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def listed(tensors: Any) -> list[Tensor]:
    """Return the tensor or tensors as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(lists: Any) -> list[list[Tensor]]:
    """Return a list of lists; a plain list of tensors is wrapped in a list."""
    lists = list(lists)
    return [lists] if lists and isinstance(lists[0], Tensor) else [list(one) for one in lists]


def flattened(tensors: Iterable[Iterable[Tensor | list[Tensor]]]) -> list[Tensor]:
    """Return all tensors, also those in inner lists."""
    found: list[Tensor] = []
    for given in tensors:
        for one in given:
            found.extend(one) if isinstance(one, list) else found.append(one)
    return found


def handed_on(opts: Any) -> tuple[Any, ...]:
    """Return ``opts`` as the arguments of a call: a tuple of one element; an empty tuple for None."""
    return () if opts is None else (opts,)


def root_of(opts: Any) -> int:
    """Return the root of a collective; ``opts`` is torch's options, or the root's number."""
    return int(opts) if isinstance(opts, int) else int(opts.rootRank)


def reduction_of(opts: Any) -> str | None:
    """Return the name of a reduction, "sum" if ``opts`` has none; None for reductions that only some backends have."""
    found = getattr(opts, "reduceOp", opts)
    if found is None:
        return "sum"
    for op, name in _REDUCTIONS.items():
        if found == op:
            return name
    return None
