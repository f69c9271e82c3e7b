"""``Transport``: carries contiguous tensors between all ranks of a group. Each kind of transport is one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from lagom.collectives.background import Work
    from lagom.collectives.native import Communicator


Merge = Callable[[Sequence[memoryview]], memoryview]


class Merging(NamedTuple):
    """How the messages of several ranks are made one, such as by a sum."""

    of_ranks: Merge
    """Merges what ranks have given, in rank order."""
    of_hosts: Merge
    """Merges what one of these functions has returned on several hosts, in the order of the hosts."""


class Messages(Protocol):
    """Exchanges of messages between all ranks: a ``Mesh``, or the ``Communicator`` of shared memory."""

    def exchange(self, head: bytes, body: memoryview | None) -> list[memoryview]: ...
    def waited(self) -> list[int]: ...
    def standing(self) -> tuple[str, int, list[int]]: ...


class Transport:
    """Exchanges contiguous tensors between all ranks of a group. See Note [Transports].

    A method begins an exchange and returns its work. A transport has the exchanges that it lists in ``operations``.

    Raises:
        RuntimeError, OSError: from every exchange or its work, when a rank is gone or ranks differ.
    """

    operations: frozenset[str] = frozenset()
    """Names of the exchanges that this transport implements."""
    is_asynchronous = False
    """Whether an exchange goes on after its method has returned."""
    memory: Communicator | None = None
    """Memory that all ranks share, for the collectives that only memory has."""

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether this transport carries ``tensors`` in ``operation``: equal on all ranks.

        Args:
            reduction: a name in ``native.OPERATIONS``, "" for no reduction, None for a reduction unknown to lagom.
        """
        return operation in self.operations and are_dense(tensors)

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> Work:
        """Reduce ``tensor`` over the ranks, in place, to the same bits on all ranks."""
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Overwrite ``tensor`` with the one of rank ``root``."""
        raise NotImplementedError

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Gather the ``part`` of every rank into ``whole``, one behind the other; all have one size."""
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
        """Fail the exchanges under way, because this rank, number ``rank``, aborted its process group."""

    def close(self) -> None:
        """Close the connections to the other ranks."""


def are_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are dense and on the CPU."""
    return all(map(_is_dense, tensors))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor. A tensor of one number may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# Note [Transports]
#
# Lagom's own exchanges (``Group``) and the backend "lagom" of torch.distributed use the same transports: shared memory,
# hosts (memory within a host, one rank of each host between them), sockets of one host, and torch's process groups
# (gloo and NCCL). ``Transports`` chooses one for each exchange of a ``Group``. The backend has one transport, and gives
# to gloo what the transport does not carry. Both ask ``carries``, whose answer depends only on things that are equal on
# all ranks: the operation, types and devices. A new transport is a new file with a subclass, and a line in
# ``transports.py``.
