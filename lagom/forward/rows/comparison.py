"""``compare``: check that the blocks of a batch give the outputs of the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.inspection.reads import is_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from lagom.forward.rows.recorder import BatchStatistics
    from lagom.forward.rows.split_candidate import SplitCandidate, SplitFinding


def compare(finding: SplitFinding, outputs: list[Any], parts: list[list[Any]], tolerance: float) -> None:
    """Compare the ``outputs`` of the whole batch with ``parts``, the outputs of each block.

    Raises:
        NotByRowsError: when they differ.
    """
    for index, (whole, factor) in enumerate(zip(outputs, finding.factors, strict=True)):
        parts_of_rank = [part[index] for part in parts]
        if factor is not None:
            together = torch.cat(parts_of_rank)
            same = together.dtype == whole.dtype and are_close(together, whole, tolerance)
        elif is_tensor(whole):
            same = all(is_tensor(one) and are_close(one, whole, tolerance) for one in parts_of_rank)
        else:
            same = all(one == whole or (one != one and whole != whole) for one in parts_of_rank)
        if not same:
            raise NotByRowsError(WholeReason.MIXES_ROWS)


def are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether both have the same shape and almost the same values; equal values if they are integers.

    Args:
        tolerance: relative to each value of ``other`` plus its largest finite value.
    """
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    finite = other[other.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def drop_rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return ``tensor`` without the rows from ``start`` to ``stop``; all of it if ``stop`` is 0."""
    return torch.cat([tensor[:start], tensor[stop:]]) if stop else tensor


def tolerance_for(candidate: SplitCandidate) -> float:
    """Return a relative tolerance for sums in another order, in the least exact type in use."""
    kinds = {p.dtype for p in candidate.module.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled(candidate.device.type):
        kinds.add(torch.get_autocast_dtype(candidate.device.type))
    return max((_TOLERANCES.get(kind, 0.05) for kind in kinds), default=1e-4)


_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4}


def compare_buffers(
    whole: list[tuple[Tensor, Tensor]], part: list[tuple[Tensor, Tensor]], noted: BatchStatistics
) -> None:
    """Compare buffers after a run on the whole batch and after a run on a block, except BatchNorm's.

    Raises:
        NotByRowsError: when they differ.
    """
    running = {id(buffer) for buffer in noted.running}
    for (buffer, ours), (other, theirs) in zip(whole, part, strict=True):
        same = buffer is other and ours.shape == theirs.shape and torch.equal(ours, theirs)
        if not same and id(buffer) not in running:
            raise NotByRowsError(WholeReason.BUFFER_OF_BATCH)
