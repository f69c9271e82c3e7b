"""``PowerSGD``: averages of matrices as products of two thin ones, with what is lost kept for the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.gradients.reduction.layout import Bucket, travelling
from lagom.gradients.reduction.mean import Mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lagom.collectives.group import Group
    from lagom.gradients.reduction.layout import Layout, LayoutEntry

RANK = 4
"""Columns of the thin matrices; the paper's experiments have 1 to 4."""
_LEAST = 2
"""Times less that the thin ones have to be, for a matrix to travel so."""


class _Kept(NamedTuple):
    """Of one parameter, from step to step."""

    second: torch.Tensor
    """Of shape (columns, ``RANK``), equal on all ranks: the next step begins with it."""
    error: torch.Tensor
    """What this rank had and the last result lacked; the shape of the matrix."""


class PowerSGD:
    """The average, of rank ``RANK`` where that is much less than all. See Note [PowerSGD]."""

    is_linear = False
    overlaps = False

    def __init__(self, group: Group) -> None:
        self._group = group
        self._mean = Mean(group)
        self._kept: dict[int, _Kept] = {}

    def room(self, room: int) -> int:
        """All of it, for what is not compressed."""
        return room

    def travelling(self, dtype: torch.dtype) -> torch.dtype:
        """As they are."""
        return travelling(dtype)

    def is_apart(self, entry: LayoutEntry) -> bool:
        """Whether it is a matrix that is worth it."""
        shape = entry.shape
        if entry.sparse or len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return _LEAST * (rows + columns) * RANK <= rows * columns

    def reduce(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Average what is in ``layout.buckets``; a collective."""
        apart: list[int] = []
        rest: list[Bucket] = []
        for bucket in layout.buckets:
            own = [i for i in bucket.indices if self.is_apart(layout.entries[i])]
            others = [i for i in bucket.indices if not self.is_apart(layout.entries[i])]
            apart += own
            rest += [Bucket(others)] if others else []
        self._mean.average(rest, gradients)
        by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in apart:
            by_type.setdefault((gradients[i].dtype, gradients[i].device), []).append(i)
        for part in by_type.values():
            self._approximate([layout.numbers[i] for i in part], [gradients[i] for i in part])

    def forget(self, is_alive: Callable[[int], bool]) -> None:
        """Drop what is kept of leaves that are gone."""
        self._kept = {number: kept for number, kept in self._kept.items() if is_alive(number)}

    def _approximate(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        matrices = [_matrix(gradient) for gradient in gradients]
        kept = [self._of(number, matrix) for number, matrix in zip(numbers, matrices, strict=True)]
        for matrix, (_, error) in zip(matrices, kept, strict=True):
            matrix.add_(error)
        firsts = self._averaged([matrix @ second for matrix, (second, _) in zip(matrices, kept, strict=True)])
        bases = [_orthonormal(first) for first in firsts]
        seconds = self._averaged([matrix.T @ base for matrix, base in zip(matrices, bases, strict=True)])
        for i, (gradient, matrix) in enumerate(zip(gradients, matrices, strict=True)):
            if not bool(firsts[i].isfinite().all()) or not bool(seconds[i].isfinite().all()):
                # On all ranks alike. Who scales losses will leave this step out; nothing of it is to come back later.
                gradient.fill_(torch.nan)
                continue
            result = bases[i] @ seconds[i].T
            self._kept[numbers[i]] = _Kept(seconds[i], matrix.sub_(result))
            gradient.copy_(result.view(gradient.shape))

    def _of(self, number: int, matrix: torch.Tensor) -> _Kept:
        found = self._kept.get(number)
        if found is not None and (found.error.shape, found.error.dtype) == (matrix.shape, matrix.dtype):
            return found
        generator = torch.Generator().manual_seed(abs(number))  # equal on all ranks, and not the program's
        start = torch.randn(matrix.shape[1], RANK, generator=generator, dtype=torch.float64)
        return _Kept(start.to(matrix), torch.zeros_like(matrix))

    def _averaged(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._group.all_reduce(flat)
        flat.div_(self._group.world_size)
        return [one.view(part.shape) for one, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]


def _matrix(gradient: torch.Tensor) -> torch.Tensor:
    """A copy, as float32 at least: rows are the first dimension, as in the paper."""
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return gradient.detach().reshape(gradient.shape[0], -1).to(dtype, copy=True)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns that span what those of ``matrix`` do, by Gram and Schmidt; a column that adds nothing becomes zeros.

    Twice, as once loses digits where columns are nearly parallel.
    """
    found: list[torch.Tensor] = []
    for column in matrix.double().unbind(dim=1):
        length = column.norm()
        for _ in range(2):
            for before in found:
                column = column - before * before.dot(column)
        left = column.norm()
        # Of single precision there is nothing but rounding left below this.
        found.append(torch.where(left > 1e-7 * length, column / left, torch.zeros_like(column)))
    return torch.stack(found, dim=1).to(matrix.dtype)


# Note [PowerSGD]
#
# Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
# (arXiv:1905.13727). With M the gradient of a rank as a matrix, plus what it has kept, and Q of the step before:
#     P = mean(M Q), made orthonormal;  Q = mean(M' P);  the result is P Q', and each rank keeps M - P Q'.
# Two sums of (rows + columns) * RANK numbers are sent in place of rows * columns. What is kept makes up for what is
# lost: the results of all steps sum up to the averages of all steps, but for the mean of what is kept last. Vectors,
# and matrices that would not be half as small, are averaged as they are.
#
# torch.distributed has this as a hook of DDP's. It takes DDP's buckets and a process group of torch's, where ours go by
# the leaves' numbers and through shared memory, so it would have to be fed with imitations of both; it keeps the error
# of a whole bucket, and a gradient that is not finite stays in it for good.
