"""gloo for the collectives, tensors and reductions that the transport of a process group does not carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lagom.exchange.torch_backend.tensor_ops import TensorCollectives, plain_contiguous, put

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
"""Names of gloo's methods by the names of the methods of ``TensorCollectives``."""
_PLAIN = {"all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"}
"""Collectives whose arguments go to gloo unchanged; the others' arguments are wrapped in lists of one element."""


def run_by_gloo(
    gloo: Any, moves: TensorCollectives, name: str, tensors: Sequence[Sequence[Any]], others: Sequence[Any]
) -> None:
    """Run a collective over gloo, with one call per tensor: gloo would add up tensors that are passed together.

    On one host, ranks first agree on gloo. Otherwise a rank whose tensor goes through shared memory would wait there
    for the others until its timeout.
    """
    moves.agree(f"{name} over gloo")
    for given in zip(*tensors, strict=True):
        in_order = [_in_order(one) for one in given]  # gloo ignores strides
        passed = in_order if name in _PLAIN else [_as_list(one) for one in in_order]
        getattr(gloo, _METHODS[name])(*passed, *others).wait()
        _put_back(given[0], in_order[0])


def _as_list(given: Any) -> list[Any]:
    """Return ``given`` as the only element of a list; an empty list, from a rank that is not the root, stays empty."""
    return [] if isinstance(given, list) and not given else [given]


def _in_order(given: Any) -> Any:
    """Return a tensor, or each tensor of a list, contiguous; tensors that are not dense are not changed."""
    if isinstance(given, list):
        return [_in_order(one) for one in given]
    return plain_contiguous(given) if given.layout == torch.strided and not given.is_quantized else given


def _put_back(given: Any, in_order: Any) -> None:
    """Copy the results in ``in_order``, which ``_in_order(given)`` returned, into the tensors of ``given``."""
    if isinstance(given, list):
        for one, other in zip(given, in_order, strict=True):
            _put_back(one, other)
    elif in_order is not given:
        put(given, in_order)


class LateGloo:
    """A gloo process group that is made at its first collective; see Note [Gloo] in transports.py.

    Args:
        make: makes the group; a collective.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name in ("send", "recv", "recv_anysource"):  # only all ranks together can make the group
                raise RuntimeError(f"{name} of a tensor that is sparse, quantized or not on the CPU; send a dense one")
            if self._made is None:
                self._made = self._make()
            return getattr(self._made, name)(*args)

        return call
