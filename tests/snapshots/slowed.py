"""``slowly``: a program with time for twins and snapshots; in a file without the tests' own state, which goes along."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils.fetch import _MapDatasetFetcher


def slowly(train: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Call ``train`` with a pause at each batch, and as many twins and snapshots as there can be.

    In a hundredth of a short run there would be none.
    """
    from lagom.restart import twin_pace
    from lagom.snapshots import snapshot_taker

    twin_pace.SHARE = snapshot_taker.SHARE = 1.0
    fetch: Any = _MapDatasetFetcher.fetch

    def pausing(self: Any, indices: Any) -> Any:
        time.sleep(0.03)
        return fetch(self, indices)

    _MapDatasetFetcher.fetch = pausing  # type: ignore[method-assign]  # the rank's process ends with the run
    return train(**options)
