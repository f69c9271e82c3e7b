"""``Transport``: carries contiguous tensors between all ranks of a group. Each kind of transport is one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from lagom.exchange.background import Work
    from lagom.exchange.native import Communicator


Merge = Callable[[Sequence[memoryview]], memoryview]


class Merging(NamedTuple):
    """Functions that merge the bodies of several ranks' messages into one body, such as their sum."""

    of_ranks: Merge
    """Merges the bodies of a host's ranks, in rank order."""
    of_hosts: Merge
    """Merges the results of ``of_ranks`` of several hosts, or its own results, in the order of the hosts."""


class Messages(Protocol):
    """Exchanges of messages between all ranks: ``Mesh``, ``HostMessages``, or the ``Communicator`` of shared memory."""

    def exchange(self, head: bytes, body: memoryview | None) -> list[memoryview]: ...
    def waited(self) -> list[int]: ...
    def standing(self) -> tuple[str, int, list[int]]: ...


class Transport:
    """Exchanges contiguous tensors between all ranks of a group. See Note [Transports].

    A method of an exchange begins it and returns its work. A subclass implements the exchanges that it supports, and
    overrides ``set_timeout``, ``abort`` and ``close`` if they shall have an effect.

    Raises:
        RuntimeError, OSError: from every exchange or its work, when a rank is gone or does not come in time. Also when
            ranks make different calls, if the transport compares them: ``MemoryTransport`` and ``HostTransport`` do.
    """

    operations: frozenset[str] = frozenset()
    """Names of the exchanges that this class's ``carries`` accepts; a subclass may override ``carries`` instead."""
    is_asynchronous = False
    """Whether an exchange goes on after its method has returned."""
    memory: Communicator | None = None
    """Communicator over memory that all ranks share, for collectives that only it has; None without such memory."""

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether this transport carries ``tensors`` in ``operation``; the answer is equal on all ranks.

        Args:
            reduction: a name in ``native.OPERATIONS``, "" for no reduction, None for a reduction unknown to lagom.
        """
        return operation in self.operations and are_dense(tensors)

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> Work:
        """Reduce ``tensor`` over the ranks, in place, to the same bits on all ranks."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Overwrite ``tensor`` with the tensor of rank ``root``."""
        raise NotImplementedError

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Concatenate the parts of all ranks, which have the same size, in rank order into ``whole``."""
        raise NotImplementedError

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> Work:
        """Fill ``out`` with this rank's part of the reduction of all ranks' ``given``."""
        raise NotImplementedError

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> Work:
        """Send row i of ``given`` to rank i, and fill row i of ``out`` with the row from rank i."""
        raise NotImplementedError

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long exchanges wait for a rank from now on."""

    def abort(self, rank: int) -> None:
        """Fail the exchanges in progress, because this rank, number ``rank``, aborted its process group."""

    def close(self) -> None:
        """Close the connections to the other ranks."""


def are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are dense and on the CPU."""
    return all(map(_is_dense, tensors))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as bytes; strides are reset, since a tensor of one number may have any."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# Note [Transports]
#
# Lagom's own exchanges (``Group``) and the backend "lagom" of torch.distributed have two kinds of transport in common:
# shared memory, and hosts (shared memory within a host, sockets between the first ranks of hosts). ``Group`` also uses
# sockets within one host, torch's process groups (gloo and NCCL), and copies on the CPU for ranks that share a GPU.
# ``Transports`` chooses a transport for each exchange of a ``Group``. The backend has one transport, and uses gloo for
# tensors that the transport does not carry. Both ask ``carries`` of shared memory and of hosts. Its answer depends only
# on facts that are equal on all ranks: the operation, the reduction, and the types, layouts and devices of the tensors.
# A new transport is a new file with a subclass, and a line in ``transports.py``.
