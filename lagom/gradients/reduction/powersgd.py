"""``PowerSGD``: averages matrices as products of two thin matrices, and adds the error to the next step's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.gradients.reduction.layout import Bucket, wire_dtype
from lagom.gradients.reduction.mean import Mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.group import Group
    from lagom.gradients.reduction.layout import Layout, LayoutEntry

RANK = 4
"""Columns of the thin matrices; the paper's experiments have 1 to 4."""
_MIN_SAVING = 2
"""A matrix is compressed only if its two thin matrices have at most 1/``_MIN_SAVING`` of its elements."""


class _CompressionState(NamedTuple):
    """The state of one parameter between two steps."""

    second: torch.Tensor
    """The second thin matrix of shape (columns, ``RANK``), equal on all ranks; the next step begins with it."""
    error: torch.Tensor
    """This rank's last gradient plus the error before, minus the result; of the matrix's shape."""


class PowerSGD:
    """Averages large matrices approximately, by matrices of rank ``RANK``. See Note [PowerSGD]."""

    is_linear = False
    overlaps = False

    def __init__(self, group: Group) -> None:
        self._group = group
        self._mean = Mean(group)
        self.states: dict[int, _CompressionState] = {}

    def frame_bytes(self, room: int) -> int:
        """Return ``room``: gradients that are not compressed may use all of it."""
        return room

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return ``dtype`` if gloo and NCCL can add it, else float32."""
        return wire_dtype(dtype)

    def travels_alone(self, entry: LayoutEntry) -> bool:
        """Return whether the gradient is a matrix that is worth compressing."""
        shape = entry.shape
        if entry.sparse or len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return _MIN_SAVING * (rows + columns) * RANK <= rows * columns

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Average the gradients in ``layout.buckets``; a collective."""
        apart: list[int] = []
        rest: list[Bucket] = []
        for bucket in layout.buckets:
            own = [i for i in bucket.indices if self.travels_alone(layout.entries[i])]
            others = [i for i in bucket.indices if not self.travels_alone(layout.entries[i])]
            apart += own
            rest += [Bucket(others)] if others else []
        self._mean.average(rest, gradients)
        by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in apart:
            by_type.setdefault((gradients[i].dtype, gradients[i].device), []).append(i)
        for part in by_type.values():
            self._approximate([layout.numbers[i] for i in part], [gradients[i] for i in part])

    def forget(self, is_alive: Callable[[int], bool]) -> None:
        """Drop the state of leaves for whose numbers ``is_alive`` is False."""
        self.states = {number: kept for number, kept in self.states.items() if is_alive(number)}

    def _approximate(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        matrices = [_to_matrix(gradient) for gradient in gradients]
        kept = [self._state_of(number, matrix) for number, matrix in zip(numbers, matrices, strict=True)]
        for matrix, (_, error) in zip(matrices, kept, strict=True):
            matrix.add_(error)
        firsts = self._average([matrix @ second for matrix, (second, _) in zip(matrices, kept, strict=True)])
        bases = [_orthonormalise(first) for first in firsts]
        seconds = self._average([matrix.T @ base for matrix, base in zip(matrices, bases, strict=True)])
        for i, (gradient, matrix) in enumerate(zip(gradients, matrices, strict=True)):
            if not bool(firsts[i].isfinite().all()) or not bool(seconds[i].isfinite().all()):
                # Equal on all ranks. A loss scaler skips this step, and the gradient must not enter the kept error.
                gradient.fill_(torch.nan)
                continue
            result = bases[i] @ seconds[i].T
            self.states[numbers[i]] = _CompressionState(seconds[i], matrix.sub_(result))
            gradient.copy_(result.view(gradient.shape))

    def _state_of(self, number: int, matrix: torch.Tensor) -> _CompressionState:
        found = self.states.get(number)
        if found is not None and (found.error.shape, found.error.dtype) == (matrix.shape, matrix.dtype):
            return found
        generator = torch.Generator().manual_seed(abs(number))  # equal on all ranks, apart from the program's
        start = torch.randn(matrix.shape[1], RANK, generator=generator, dtype=torch.float64)
        return _CompressionState(start.to(matrix), torch.zeros_like(matrix))

    def _average(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._group.all_reduce(flat)
        flat.div_(self._group.world_size)
        return [one.view(part.shape) for one, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]


def _to_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy as a matrix in float32 or float64; its rows are the first dimension, as in the paper."""
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return gradient.detach().reshape(gradient.shape[0], -1).to(dtype, copy=True)


def _orthonormalise(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns with the span of ``matrix``, by Gram-Schmidt; a dependent column becomes zeros.

    Each column is projected twice, since one projection loses digits if columns are nearly parallel.
    """
    found: list[torch.Tensor] = []
    for column in matrix.double().unbind(dim=1):
        length = column.norm()
        for _ in range(2):
            for before in found:
                column = column - before * before.dot(column)
        left = column.norm()
        # In single precision, a rest below this is only rounding.
        found.append(torch.where(left > 1e-7 * length, column / left, torch.zeros_like(column)))
    return torch.stack(found, dim=1).to(matrix.dtype)


# Note [PowerSGD]
#
# Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
# (arXiv:1905.13727). Let M be a rank's gradient as a matrix, plus the error that the rank has kept, and Q the matrix of
# the last step:
#     P = mean(M Q), made orthonormal;  Q = mean(M' P);  the result is P Q', and each rank keeps M - P Q'.
# Two sums with (rows + columns) * RANK elements in all are sent instead of rows * columns. The kept errors make
# up for the loss: the sum of the results of all steps is the sum of all averages, minus the mean of the last errors.
# Vectors, and matrices that would not shrink to half, are averaged without compression.
#
# torch.distributed has PowerSGD as a hook of DDP. The hook needs DDP's buckets and a process group of torch. lagom's
# gradients are identified by the leaves' numbers and travel through shared memory, so both would have to be imitated.
# Besides, the hook keeps one error for a whole bucket, in which a gradient that is not finite stays for good.
