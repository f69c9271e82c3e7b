"""``GridSampler``: Optuna's grid sampler, made faster for grids of many values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna import samplers


class GridSampler(samplers.GridSampler):
    """Optuna's grid sampler, which recognizes trials of its own grid faster.

    At the beginning and end of each trial Optuna compares its grid, value by value, with the grid of each earlier
    trial: with 100 values, 20 ms a trial. Here equal grids are found equal by one comparison.
    """

    def _same_search_space(self, search_space: Mapping[str, Sequence[Any]]) -> bool:
        return search_space == self._search_space or super()._same_search_space(search_space)
