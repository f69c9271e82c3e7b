"""``BatchIndices``: base class for the indices of a batch that know how to be split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BatchIndices:
    """Indices of a batch that are split over ranks by methods of their own, not by their order in the batch.

    A sampler that yields them has a data set that reads them, in ``__getitems__``.
    """

    __slots__ = ()

    def deal(self, rank: int, world_size: int) -> Any:
        """Return the indices of ``rank``."""
        raise NotImplementedError

    @staticmethod
    def together(batches: Sequence[Any]) -> Any:
        """Join batches that follow each other into one."""
        raise NotImplementedError
