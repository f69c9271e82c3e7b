"""``count_rows``, ``count_samples``: the number of rows in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def count_samples(data: Any) -> int:
    """Return the number of rows of the first tensor or array in ``data`` that has rows; 1 if there is none."""
    count = count_rows(data)
    return 1 if count is None else count


def count_rows(data: Any) -> int | None:
    """Return the number of rows of the first tensor or array in ``data`` that has rows; None if there is none."""
    if isinstance(data, torch.Tensor):
        return data.size(0) if data.dim() else None  # nested tensors have no len()
    if isinstance(data, Mapping):
        parts: Iterable[Any] = data.values()
    elif isinstance(data, (list, tuple)):
        # A list of texts is a column of the batch, which has no rows to count here.
        parts = () if data and isinstance(data[0], (str, bytes)) and type(data) is list else data
    else:
        shape = getattr(data, "shape", None)
        return int(shape[0]) if isinstance(shape, tuple) and shape else None
    for part in parts:
        count = count_rows(part)
        if count is not None:
            return count
    return None
