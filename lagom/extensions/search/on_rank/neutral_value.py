"""``NeutralValue``: the value in place of a column that is left out: 0, or the most frequent text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch


class NeutralValue:
    """Finds the value that stands for a feature that is left out: 0 for numbers, else the most frequent value.

    If several are equally frequent, the least of them counts. See Note [Left-out features] in left_out_features.py.
    """

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()

    def add(self, values: Any) -> None:
        """Count ``values``, an array, tensor or list of any shape; numbers, None and NaN are not counted."""
        if not is_number(values):
            self._counts.update(one for one in _array(values).ravel().tolist() if one is not None and one == one)

    def value(self) -> Any:
        """Return the most frequent value; 0 if none was counted."""
        most = max(self._counts.values(), default=0)
        return min((one for one, count in self._counts.items() if count == most), default=0)


def neutral_value(values: Any) -> Any:
    """Return the neutral value of ``values``."""
    found = NeutralValue()
    found.add(values)
    return found.value()


def is_number(values: Any) -> bool:
    """Return whether ``values`` are numbers: one number, an array or list of numbers, a tensor or a list of tensors."""
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], torch.Tensor):
        return True
    return isinstance(values, torch.Tensor) or _array(values).dtype.kind in "biufc"


def _array(values: Any) -> Any:
    """Return ``values`` as an array; lists of different lengths become one row."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.concatenate([_array(one).ravel() for one in values])
