"""``Pass`` and ``Share``: an iteration over a loader, and what of its batches is this rank's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)  # not frozen: there is one for each batch, and to make it would take four times as long
class Share:
    """What of a batch is this rank's."""

    num_mine: int
    num_all: int
    even: bool
    """All ranks have as many."""
    step: int | None = field(default=None, compare=False)
    """Which batch of its pass, from 1 on, where that is the same on all ranks; known when the program sees it."""

    def weight(self, world_size: int) -> float:
        """What the root of a backward is multiplied by, so that the average over ranks is the mean of the batch."""
        return world_size * self.num_mine / self.num_all


@dataclass(eq=False)
class Pass:
    """One iteration over a loader."""

    training: bool
    sharded: bool
    own: bool = False
    """Its data set shards itself: each rank's batches are its own."""
    by_mode: bool = False
    """Gradients are on; it is no training because the model is in eval mode."""
    steps: int | None = None
    step: int = 0
    shares: deque[Share | None] = field(default_factory=deque)
    """Of the batches that the sampler has given and the user has not seen yet: workers fetch ahead."""
    current: Share | None = None
    failed: bool = False
    """Its next batch could not be loaded."""


def tensors(data: Any) -> list[torch.Tensor]:
    """The tensors in ``data``, which may be a tensor, or tuples, lists and dicts of them."""
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, dict):
        data = data.values()
    elif not isinstance(data, (tuple, list)):
        return []
    found: list[torch.Tensor] = []
    for part in data:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list, dict)):
            found += tensors(part)
    return found


LEFT_OUT = (
    "a batch has fewer rows than samples that were fetched for it: where collate_fn leaves samples out, ranks are left "
    "with other numbers of them than their shares are weighted by. Leave them out of the data set (a Subset, a "
    "sampler), or use batches='whole'"
)


def leaves_out(data: Any, share: Share) -> bool:
    """Whether ``data`` seems to be of fewer samples than the ``share``: all its tensors have as few rows."""
    if data is None:
        return share.num_mine > 0
    found = [tensor.shape for tensor in tensors(data) if tensor.dim()]
    same = len({shape[0] for shape in found}) == 1
    return same and found[0][0] < share.num_mine and not any(share.num_mine in shape for shape in found)
