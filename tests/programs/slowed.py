"""``slowly``: a program with time for snapshots; in a file without the tests' own state, which goes along."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils.fetch import _MapDatasetFetcher


class SlowRank:
    """Settings of a rank in which each fetch of a loader takes a moment, and the indices that it has fetched.

    It is a variable of the program, so a process that goes on from a snapshot gets it, and sets the same.
    """

    def __init__(self, *, by_rows: bool, pause_s: float) -> None:
        self.by_rows, self.pause_s, self.fetched = by_rows, pause_s, list[Any]()
        self._set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set()

    def _set(self) -> None:
        from lagom.forward.rows import whole_batch

        # In a hundredth of a short run there would be no snapshots, and rows of small models are not shared.
        with contextlib.suppress(ModuleNotFoundError):  # the extension may be missing
            from lagom.extensions.resume import snapshot_pace

            snapshot_pace.SHARE = 1.0
        whole_batch.ALWAYS = self.by_rows
        fetch: Any = _MapDatasetFetcher.fetch

        def pausing(fetcher: Any, indices: Any) -> Any:
            # The first ones take longer: a program of a few batches also has a snapshot before it ends.
            time.sleep(self.pause_s if len(self.fetched) > 3 else 5 * self.pause_s)
            self.fetched.append(indices)
            return fetch(fetcher, indices)

        _MapDatasetFetcher.fetch = pausing  # type: ignore[method-assign]  # the rank's process ends with the run


def slowly(
    train: Callable[..., Any], options: dict[str, Any], *, by_rows: bool, pause_s: float
) -> tuple[Any, list[Any]]:
    """Call ``train`` with as many snapshots as there can be; return its value, and the indices it fetched.

    Args:
        by_rows: has ranks share out the rows of each model for which that is right, however small it is.
        pause_s: time that a fetch takes.
    """
    rank = SlowRank(by_rows=by_rows, pause_s=pause_s)
    return train(**options), rank.fetched
