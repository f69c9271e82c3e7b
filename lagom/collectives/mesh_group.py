"""``MeshGroup``: exchanges of CPU tensors by messages, for ranks of one host that share no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lagom.collectives.background import Done
from lagom.collectives.tensor_ops import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lagom.collectives.mesh import Mesh

_PART = 1 << 21
"""Bytes of a message: smaller ones wake ranks more often."""


class MeshGroup:
    """Offers the methods of a process group that ``Group`` calls; tensors are contiguous and on the CPU.

    A rank adds up one part of each piece, in rank order, and sends the sums to the others: all have the same bits.

    Raises:
        OSError: from every method, when another rank is gone or did not answer in time.
    """

    def __init__(self, mesh: Mesh, rank: int, world_size: int) -> None:
        self._mesh = mesh
        self._rank = rank
        self._world_size = world_size

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Done:
        """Sum a tensor over the ranks, in place."""
        (tensor,) = tensors
        # The size of a piece is a multiple of every type's size, so that parts end between numbers.
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
        return Done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        """Overwrite a tensor with the one of rank ``root``."""
        for piece in _pieces(tensor):
            row = self._rows(piece if self._rank == root else piece[:0])[root]
            if self._rank != root:
                piece.copy_(row)
        return Done()

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Done:
        """Fill each output with the input of one rank."""
        self._gather([bytes_of(output) for output in outputs[0]], inputs[0])
        return Done()

    def _allgather_base(self, whole: torch.Tensor, part: torch.Tensor) -> Done:
        """Fill ``whole`` with the parts of all ranks, one behind the other."""
        self._gather(list(bytes_of(whole).view(self._world_size, -1)), part)
        return Done()

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *_: object) -> Done:
        """Fill ``output`` with this rank's row from each rank."""
        everything = [torch.empty_like(given) for _ in range(self._world_size)]
        self.allgather([everything], [given])
        for row, theirs in zip(output, everything, strict=True):
            row.copy_(theirs[self._rank])
        return Done()

    def _gather(self, outputs: Sequence[torch.Tensor], given: torch.Tensor) -> None:
        start = 0
        for piece in _pieces(given):
            for output, row in zip(outputs, self._rows(piece), strict=True):
                output[start : start + len(piece)].copy_(row)
            start += len(piece)

    def _rows(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of all ranks; valid until the next call."""
        found = [_tensor(row) for row in self._mesh.exchange(b"", piece.numpy().data)]
        found[self._rank] = piece
        return found


def _tensor(row: memoryview) -> torch.Tensor:
    return torch.frombuffer(row, dtype=torch.uint8) if len(row) else torch.empty(0, dtype=torch.uint8)


def _pieces(tensor: torch.Tensor, size: int = _PART) -> Iterator[torch.Tensor]:
    """Yield the bytes of ``tensor`` in pieces."""
    return iter(bytes_of(tensor.detach()).split(size) if tensor.numel() else ())
