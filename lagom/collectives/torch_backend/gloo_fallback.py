"""gloo for the tensors and reductions that the transport of a process group does not carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lagom.collectives.torch_backend.tensor_ops import TensorCollectives, plain_contiguous, put

_METHODS = {
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "_allgather_base",
    "all_gather_list": "allgather",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_list": "reduce_scatter",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "alltoall",
    "all_to_all_single": "alltoall_base",
}
"""gloo's methods by the names of those of ``TensorCollectives``."""
_PLAIN = {"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"}
"""Methods that take tensors; the others take lists, with one of each argument for each tensor of the caller."""


def run_by_gloo(
    gloo: Any, moves: TensorCollectives, name: str, tensors: Sequence[Sequence[Any]], others: Sequence[Any]
) -> None:
    """Run a collective over gloo, one call at a time: gloo would add up tensors that are given together.

    Ranks agree first: a rank whose tensors memory carries would wait there for the others, in vain.
    """
    moves.agree(f"{name} over gloo")
    for given in zip(*tensors, strict=True):
        in_order = [_in_order(one) for one in given]  # gloo takes memory as it lies, gaps included
        passed = in_order if name in _PLAIN else [_as_list(one) for one in in_order]
        getattr(gloo, _METHODS[name])(*passed, *others).wait()
        _put_back(given[0], in_order[0])


def _as_list(given: Any) -> list[Any]:
    """Return a list of ``given``; an empty one for the empty list of a rank that is not the root."""
    return [] if isinstance(given, list) and not given else [given]


def _in_order(given: Any) -> Any:
    """Return the tensor, or each in a list, contiguous; tensors that are not dense stay as they are."""
    if isinstance(given, list):
        return [_in_order(one) for one in given]
    return plain_contiguous(given) if given.layout == torch.strided and not given.is_quantized else given


def _put_back(given: Any, in_order: Any) -> None:
    """Copy the results in ``in_order``, which ``_in_order`` returned, into the tensors that it was given."""
    if isinstance(given, list):
        for one, other in zip(given, in_order, strict=True):
            _put_back(one, other)
    elif in_order is not given:
        put(given, in_order)


class LateGloo:
    """A gloo process group that is made when all ranks call one of its collectives; see Note [Gloo] in transports.py.

    Args:
        make: makes it, on all ranks.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name in ("send", "recv", "recv_anysource"):  # two ranks alone cannot make a group of all
                raise RuntimeError(f"{name} of a tensor that is sparse, quantized or not on the CPU; send a dense one")
            if self._made is None:
                self._made = self._make()
            return getattr(self._made, name)(*args)

        return call
