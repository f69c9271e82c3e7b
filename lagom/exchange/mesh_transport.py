"""``MeshTransport``: exchanges of CPU tensors by messages, on one host, where shared memory does not carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lagom.exchange.background import DONE
from lagom.exchange.transport import Transport, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lagom.exchange.background import CompletedWork
    from lagom.exchange.sockets.mesh import Mesh

_PART = 1 << 21
"""Most bytes of a message: with smaller messages ranks would wake more often."""


class MeshTransport(Transport):
    """Sends tensors as messages; each exchange is done when its method returns.

    In an all-reduce, each rank sums one part of each piece, in rank order, and sends the sums to the other ranks. So
    all ranks have the same bits.

    Raises:
        OSError: from every method, when another rank is gone or did not answer in time.
    """

    operations = frozenset({"all_reduce", "broadcast", "all_gather", "all_to_all_rows"})

    def __init__(self, mesh: Mesh, rank: int, world_size: int) -> None:
        self._mesh = mesh
        self._rank = rank
        self._world_size = world_size

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether the tensors are dense and on the CPU, and the reduction, if any, is a sum."""
        return reduction in ("", "sum") and super().carries(operation, tensors)

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> CompletedWork:
        # The size of a piece is a multiple of every type's size, so that parts end between elements.
        for piece in _pieces(tensor, self._world_size * _PART):
            parts = [piece[start : start + _PART] for start in range(0, self._world_size * _PART, _PART)]
            rows = [_tensor(row) for row in self._mesh.deal([part.numpy().data for part in parts])]
            rows[self._rank] = parts[self._rank]
            total = rows[0].view(tensor.dtype).clone()
            for row in rows[1:]:
                total += row.view(tensor.dtype)
            parts[self._rank].copy_(total.view(torch.uint8))
            for part, row in zip(parts, self._rows(parts[self._rank]), strict=True):
                part.copy_(row)
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> CompletedWork:
        for piece in _pieces(tensor):
            row = self._rows(piece if self._rank == root else piece[:0])[root]
            if self._rank != root:
                piece.copy_(row)
        return DONE

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> CompletedWork:
        start = 0
        for piece in _pieces(part):
            for output, row in zip(bytes_of(whole).view(self._world_size, -1), self._rows(piece), strict=True):
                output[start : start + len(piece)].copy_(row)
            start += len(piece)
        return DONE

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> CompletedWork:
        """Gather the rows of all ranks, and keep the rows for this rank."""
        everything = given.new_empty((self._world_size, *given.shape))
        self.all_gather(everything, given)
        out.copy_(everything[:, self._rank])
        return DONE

    def close(self) -> None:
        self._mesh.close()

    def _rows(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return the ``piece`` of every rank, in rank order; valid until the next call."""
        found = [_tensor(row) for row in self._mesh.exchange(b"", piece.numpy().data)]
        found[self._rank] = piece
        return found


def _tensor(row: memoryview) -> torch.Tensor:
    return torch.frombuffer(row, dtype=torch.uint8) if len(row) else torch.empty(0, dtype=torch.uint8, device="cpu")


def _pieces(tensor: torch.Tensor, size: int = _PART) -> Iterator[torch.Tensor]:
    """Yield the bytes of ``tensor`` in pieces."""
    return iter(bytes_of(tensor.detach()).split(size) if tensor.numel() else ())
