"""``SpreadProcessGroup``: the backend "lagom" for ranks on several hosts; gloo does what ``HostExchanges`` lacks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lagom.collectives.hosts import HostExchanges
from lagom.collectives.tensor_ops import TensorCollectives, fit, flat_of, put
from lagom.collectives.torch_backend.arguments import handed_on, listed, reduction_of, root_of
from lagom.collectives.torch_backend.shared_group import SharedProcessGroup

_TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
"""Types that gloo sums, too."""


class SpreadProcessGroup(SharedProcessGroup):
    """Exchanges over several hosts. See Note [Several hosts].

    Raises:
        RuntimeError: from every method or its work, when the exchange fails.
    """

    def __init__(self, gloo: Any, hosts: HostExchanges, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(gloo, _Nothing(rank, size), rank, size, timeout)
        self._hosts = hosts

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor by itself, in place."""
        given, hosts = listed(tensors), self._hosts
        reduction = reduction_of(opts)
        if not _sums(reduction, given) or not TensorCollectives.carries(self._moves, given):
            return super().allreduce(given, opts)

        def run() -> None:
            for tensor in given:
                flat = flat_of(tensor)
                hosts.all_reduce(flat)
                self._divide(flat, reduction)
                put(tensor, flat)

        return self._collective(run, opts, given)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Broadcast in place; ``opts`` has the root, or is the root."""
        given, hosts, root = listed(tensors), self._hosts, root_of(opts)
        if not TensorCollectives.carries(self._moves, given):
            return super().broadcast(given, opts)

        def run() -> None:
            for tensor in given:
                flat = flat_of(tensor)
                hosts.broadcast(flat, root)
                put(tensor, flat)

        return self._collective(run, opts, given)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Fill each output with one input of all ranks, one behind the other."""
        outs, given, hosts = listed(outputs), listed(inputs), self._hosts
        if not TensorCollectives.carries(self._moves, [*given, *outs]):
            return super().all_gather_single_coalesced(outs, given, opts)

        def run() -> None:
            for out, tensor in zip(outs, given, strict=True):
                fit("all_gather", out.numel(), self.size() * tensor.numel(), out, tensor)
                flat = flat_of(out)
                hosts.all_gather(flat, flat_of(tensor))
                put(out, flat)

        return self._collective(run, opts, outs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Fill each output with this rank's part of a reduced input."""
        outs, given, hosts = listed(outputs), listed(inputs), self._hosts
        reduction = reduction_of(opts)
        if not _sums(reduction, (*outs, *given)) or not TensorCollectives.carries(self._moves, [*given, *outs]):
            return super().reduce_scatter_single_coalesced(outs, given, opts)

        def run() -> None:
            for out, tensor in zip(outs, given, strict=True):
                fit("reduce_scatter", tensor.numel(), self.size() * out.numel(), out, tensor)
                flat = flat_of(out)
                hosts.reduce_scatter(flat, flat_of(tensor))
                self._divide(flat, reduction)
                put(out, flat)

        return self._collective(run, opts, outs)

    def barrier(self, opts: Any = None) -> Any:
        """Begin a barrier; all ranks have come when the work is done."""
        return self._gloo.barrier(*handed_on(opts))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait as gloo's monitored barrier, which names the ranks that did not come."""
        self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)

    def _divide(self, total: Tensor, reduction: str | None) -> None:
        """Divide the sum by the number of ranks if the reduction is an average."""
        if reduction == "avg":
            total.detach().div_(self.size())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long exchanges wait for a rank from now on."""
        self._timeout = timeout
        if self._hosts.near is not None:
            self._hosts.near.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Close the connections; exchanges under way go on."""
        self._close_lanes()
        self._hosts.close()

    def abort(self) -> None:
        """Fail the exchanges under way on this host's ranks."""
        self._hosts.abort()
        self._close_lanes(waits=False)
        self._hosts.close()

    # Names that older versions of torch use.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _sums(reduction: str | None, tensors: Sequence[Tensor]) -> bool:
    """Return whether hosts compute this reduction: sums and averages of types that gloo adds."""
    if reduction == "avg":
        return all(tensor.dtype in _TYPES and tensor.is_floating_point() for tensor in tensors)
    return reduction == "sum" and all(tensor.dtype in _TYPES for tensor in tensors)


class _Nothing(TensorCollectives):
    """Stands for shared memory that carries nothing, so that gloo serves every tensor."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        """Return False."""
        return False

    def agree(self, what: str) -> None:
        """Do nothing: all calls go to gloo."""
