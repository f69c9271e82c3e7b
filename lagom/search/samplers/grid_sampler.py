"""``GridSampler``: Optuna's, for grids of many values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna import samplers


class GridSampler(samplers.GridSampler):
    """Optuna's sampler of a grid, which knows its own trials sooner.

    At the end of each trial Optuna compares every value of the grid with those that every earlier trial was drawn
    from, one by one: with 100 values, 20 ms a trial.
    """

    def _same_search_space(self, search_space: Mapping[str, Sequence[Any]]) -> bool:
        return search_space == self._search_space or super()._same_search_space(search_space)
