"""What torch hands to a process group, in plain values: tensors, roots and reductions."""

from __future__ import annotations

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
    """As a list, whatever torch gave."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(lists: Any) -> list[list[Tensor]]:
    """As a list of lists; a list of tensors is the only one."""
    lists = list(lists)
    return [lists] if lists and isinstance(lists[0], Tensor) else [list(one) for one in lists]


def handed_on(opts: Any) -> tuple[Any, ...]:
    """Options as they are handed on: not at all, where there are none."""
    return () if opts is None else (opts,)


def root_of(opts: Any) -> int:
    """The root of a collective's options, or what stands for them."""
    return int(opts) if isinstance(opts, int) else int(opts.rootRank)


def reduction_of(opts: Any) -> str | None:
    """The operation of an all-reduce's options; None for what only some backends have."""
    found = getattr(opts, "reduceOp", opts)
    if found is None:
        return "sum"
    return next((name for op, name in _REDUCTIONS.items() if found == op), None)
