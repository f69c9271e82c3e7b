"""``LoaderPass``, ``BatchShare``, ``PassTracker``: iterations over loaders, and what of a batch is this rank's."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lagom.errors import LagomError

if TYPE_CHECKING:
    from lagom.files.publishing import Publication, Readers
    from lagom.loaders.evaluation_passes import Use


@dataclass(slots=True)  # not frozen: there is one for each batch, and to make it would take four times as long
class BatchShare:
    """What of a batch is this rank's."""

    num_mine: int
    num_all: int
    even: bool
    """All ranks have as many."""
    step: int | None = field(default=None, compare=False)
    """Which batch of its pass, from 1 on, where that is the same on all ranks; known when the program sees it."""
    num_rows: int | None = field(default=None, compare=False)
    """Rows of its first tensor as the program sees it: fewer than ``num_mine`` where collate_fn leaves samples out."""
    use: Use | None = field(default=None, compare=False)
    """What becomes of the pass that it is of, where that is followed."""

    def weight(self, world_size: int) -> float:
        """What the root of a backward is multiplied by, so that the average over ranks is the mean of the batch."""
        return world_size * self.num_mine / self.num_all


@dataclass(eq=False)
class LoaderPass:
    """One iteration over a loader."""

    training: bool
    sharded: bool
    own: bool = False
    """Its data set shards itself: each rank's batches are its own."""
    by_mode: bool = False
    """Gradients are on; it is no training because the model is in eval mode."""
    steps: int | None = None
    step: int = 0
    shares: deque[BatchShare | None] = field(default_factory=deque)
    """Of the batches that the sampler has given and the user has not seen yet: workers fetch ahead."""
    current: BatchShare | None = None
    failed: bool = False
    """Its next batch could not be loaded."""
    ended: bool = False
    """It is exhausted."""
    published: Publication | None = None
    """What rank 0 says of it in threads of the program's; None where nothing is to be the same on all ranks."""

    readers: Readers | None = None
    """The program's threads that read loaders, if one of them is in it."""
    generator: torch.Generator | None = None
    """What torch's samplers draw from in place of the global one."""
    use: Use | None = None
    """What the program does with its rows, where they are dealt out because it seems to be training."""

    def publication(self) -> Publication:
        """``published``, for what a thread needs."""
        if self.published is None:
            raise LagomError(_NO_NAME)
        return self.published


_NO_NAME = (
    "the sampler of a data loader is read in a thread of the program's, past the loader: other ranks cannot tell which "
    "pass it belongs to; read the loader itself, or do so in the main thread"
)
_NONE = weakref.ref(LoaderPass(training=False, sharded=False))
"""To no pass: it is gone at once."""


class PassTracker:
    """Those that the program is in, as far as it has got, and the share of the batch that it is at."""

    def __init__(self) -> None:
        self.used: BatchShare | None = None
        """Of the batch that a model was called with since the last one was seen."""
        self.evaluation: weakref.ref[LoaderPass] = _NONE
        """The pass of the batch seen last, if that is an evaluation."""
        self.by_mode: weakref.ref[LoaderPass] = _NONE
        """The last evaluation, as long as it goes on, that is one because the model is in eval mode."""
        self.progress: dict[str, int | None] = {"epoch": 0, "step": 0, "steps": None}
        """Of training; another one for each batch, so that another thread may read it."""
        self._training: list[weakref.ref[LoaderPass]] = []
        """That go on, the one that went on last at the end."""
        self._last: BatchShare | None = None
        self._epoch = 0
        self.have_read = False
        """A loader has given a batch that may be trained on."""

    def yielded(self, current: LoaderPass, share: BatchShare | None) -> None:
        """The program sees a training batch; its share holds until another one's or the end of its pass."""
        self.evaluation = _NONE
        self.used = None
        self.have_read = True
        current.current = share
        current.step += 1
        if not (self._training and self._training[-1]() is current):
            self._goes_on(current)
        self._last = share
        self.progress = {"epoch": self._epoch, "step": current.step, "steps": current.steps}

    def _goes_on(self, current: LoaderPass) -> None:
        """A pass that is not the last one that went on."""
        ref = next((ref for ref in self._training if ref() is current), None)
        if ref is None:
            self._epoch += 1
            ref = weakref.ref(current)
        else:
            self._training.remove(ref)
        self._training.append(ref)

    def evaluating(self, current: LoaderPass) -> None:
        """The program sees a batch of a pass that is evaluation."""
        self.evaluation = weakref.ref(current)
        self.have_read = self.have_read or current.by_mode
        if current.by_mode and self.by_mode() is not current:
            self.by_mode = self.evaluation

    def ended(self, current: LoaderPass) -> None:
        """The pass is exhausted."""
        current.ended = True
        self._training = [ref for ref in self._training if ref() is not current]
        if self.by_mode() is current:
            self.by_mode = _NONE
        self.evaluation = _NONE
        self.used = None

    def trains(self) -> bool:
        """Whether one of those that go on is training."""
        return any(ref() is not None for ref in self._training)

    @property
    def share(self) -> BatchShare | None:
        """Of the batch that a model was called with since the last one was seen; where that is not known, of the
        batch most recently seen in a pass that is still going on, else in the last one.

        The last one's stays: ``x, y = next(iter(loader))`` may be trained on for long. On a loss that is
        equal on all ranks no weight does harm, since weights average to 1. None in an evaluation, whose batches
        every rank has whole.
        """
        if self.used is not None:
            return self.used
        if self.evaluation() is not None:
            return None
        while self._training:
            innermost = self._training[-1]()
            if innermost is not None:
                return innermost.current
            self._training.pop()
        return self._last


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


def is_there(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether the tensor that ``ref`` refers to is still alive."""
    tensor = ref()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined]  # not in the stubs; see torch.utils.weak.TensorWeakRef
    return tensor is not None


NOT_SHARED = {
    "split": (
        "nothing is shared out: what the program trains on comes from no torch.utils.data.DataLoader, so every rank "
        "computes all of it, which is right but not faster. Read batches from a DataLoader; or use batches='whole', "
        "which shares out the rows that a model is called with, where that takes less time"
    ),
    "whole": (
        "nothing is shared out: what the program trains on comes from no torch.utils.data.DataLoader, and no model is "
        "called whose rows ranks share out, so every rank computes all of it, which is right but not faster. From a "
        "DataLoader, batches='split' shares out the batches themselves; verify=True tells whether that is exact"
    ),
}
"""By ``batches``: why every rank computes all of what the program trains on."""

LEFT_OUT = (
    "a batch has fewer rows than samples that were fetched for it: where collate_fn leaves samples out, ranks are left "
    "with other numbers of them than their shares are weighted by. Leave them out of the data set (a Subset, a "
    "sampler), or use batches='whole'"
)


def leaves_out(data: Any, share: BatchShare) -> bool:
    """Whether ``data`` seems to be of fewer samples than the ``share``: all its tensors have as few rows."""
    if data is None:
        return share.num_mine > 0
    found = [tensor.shape for tensor in tensors(data) if tensor.dim()]
    same = len({shape[0] for shape in found}) == 1
    return same and found[0][0] < share.num_mine and not any(share.num_mine in shape for shape in found)
