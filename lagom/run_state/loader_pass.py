"""``LoaderPass``, ``BatchShare``, ``PassTracker``: iterations over loaders, and this rank's share of each batch."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from lagom.errors import LagomError
from lagom.patching.object_reference import HiddenReference
from lagom.run_state.batch_contents import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lagom.batches.evaluation_passes import PassUse
    from lagom.batches.reading_threads import Publication, ReaderThreads


@dataclass(slots=True)  # not frozen: a share is made for each batch, and a frozen class would take four times as long
class BatchShare:
    """This rank's share of one batch."""

    num_mine: int
    num_all: int
    even: bool
    """Whether all ranks have the same number of samples."""
    step: int | None = field(default=None, compare=False)
    """Number of the batch within its pass, from 1 on.

    None before the program sees the batch, and for a data set that shards itself.
    """
    num_rows: int | None = field(default=None, compare=False)
    """Rows of the batch's first tensor as the program sees it; collate_fn may leave samples out."""
    use: PassUse | None = field(default=None, compare=False)
    """The program's use of the pass, if it is tracked."""

    def weight(self, world_size: int) -> float:
        """Return the factor for the loss by which the average over ranks becomes the mean over the batch."""
        return world_size * self.num_mine / self.num_all


@dataclass(eq=False)
class LoaderPass:
    """State of one iteration over a loader: training or evaluation, split or whole, and the share of the batch."""

    training: bool
    is_split: bool
    own: bool = False
    """Whether the data set shards itself, so that ranks have different batches."""
    by_mode: bool = False
    """Whether the pass counts as an evaluation only because the model is in eval mode, although gradients are on."""
    loading: Literal["repeated", "divided", "shared"] = "repeated"
    """Whether every rank loads all samples of a batch, ranks divide them, or one set of workers serves all ranks."""
    steps: int | None = None
    step: int = 0
    shares: deque[BatchShare | None] = field(default_factory=deque)
    """Shares of the batches that the sampler has drawn and the program has not seen yet: workers fetch ahead."""
    current: BatchShare | None = None
    failed: bool = False
    """Whether the latest training batch could not be loaded."""
    ended: bool = False
    """Whether the pass is exhausted."""
    published: Publication | None = None
    """Messages that rank 0 publishes if a thread of the program reads the pass; None if the pass needs none."""
    readers: ReaderThreads | None = None
    """The program's threads that read loaders; None if ``published`` is None."""
    generator: torch.Generator | None = None
    """Generator for torch's samplers in place of the global generator; None for the global one."""
    use: PassUse | None = None
    """The program's use of the rows, tracked if batches are split because the pass seems to be training; else None."""

    def publication(self) -> Publication:
        """Return ``published``, for a pass that a thread of the program reads.

        Raises:
            LagomError: if the pass has none.
        """
        if self.published is None:
            raise LagomError(_NO_NAME)
        return self.published


_NO_NAME = (
    "the sampler of a data loader is read in a thread of the program's, past the loader: other ranks cannot tell which "
    "pass it belongs to; read the loader itself, or do so in the main thread"
)
_NONE = weakref.ref(LoaderPass(training=False, is_split=False))
"""A dead reference, which stands for no pass."""


class PassTracker:
    """Tracks active loader passes and this rank's share of the current batch."""

    def __init__(self) -> None:
        self.used: BatchShare | None = None
        """Share of the batch that a model was last called with; None after the next training batch or a pass's end."""
        self.evaluation: weakref.ref[LoaderPass] = _NONE
        """The pass of the batch that the program saw last, if it is an evaluation; else a dead reference."""
        self.by_mode: weakref.ref[LoaderPass] = _NONE
        """The last evaluation pass with ``LoaderPass.by_mode``, until it ends."""
        self.progress: dict[str, int | None] = {"epoch": 0, "step": 0, "steps": None}
        """Epoch and step of training. A new dict for each batch, so that another thread may read it."""
        self._training: list[weakref.ref[LoaderPass]] = []
        """Unfinished training passes, the most recently used one last."""
        self._last: BatchShare | None = None
        self._epoch = 0
        self.have_read = False
        """Whether a loader has given the program a batch that may be trained on."""

    def record_batch(self, current: LoaderPass, share: BatchShare | None) -> None:
        """Record a training batch of ``current`` and this rank's ``share`` of it, None for a whole batch."""
        self.evaluation = _NONE
        self.used = None
        self.have_read = True
        current.current = share
        current.step += 1
        if not (self._training and self._training[-1]() is current):
            self._move_to_end(current)
        self._last = share
        self.progress = {"epoch": self._epoch, "step": current.step, "steps": current.steps}

    def _move_to_end(self, current: LoaderPass) -> None:
        """Move a training pass to the end of the list, or add it as a new epoch."""
        ref = next((ref for ref in self._training if ref() is current), None)
        if ref is None:
            self._epoch += 1
            ref = weakref.ref(current)
        else:
            self._training.remove(ref)
        self._training.append(ref)

    def restore(self, progress: dict[str, int | None], current: Iterable[LoaderPass]) -> None:
        """Adopt the state of another process: its ``progress`` and its unfinished passes ``current``."""
        self.progress, self._epoch = progress, progress["epoch"] or 0
        for one in current:
            if one.training and one.step:
                self._training.append(weakref.ref(one))

    def record_evaluation(self, current: LoaderPass) -> None:
        """Record a batch of an evaluation pass."""
        self.evaluation = weakref.ref(current)
        self.have_read = self.have_read or current.by_mode
        if current.by_mode and self.by_mode() is not current:
            self.by_mode = self.evaluation

    def end_pass(self, current: LoaderPass) -> None:
        """Record that the pass is exhausted."""
        current.ended = True
        self._training = [ref for ref in self._training if ref() is not current]
        if self.by_mode() is current:
            self.by_mode = _NONE
        self.evaluation = _NONE
        self.used = None

    def trains(self) -> bool:
        """Return whether a training pass is unfinished."""
        return any(ref() is not None for ref in self._training)

    @property
    def share(self) -> BatchShare | None:
        """This rank's share of the batch that the program works on; None if that batch is whole.

        It is the share of the training batch with which a model was last called (``used``). If this is unknown, it is
        None in an evaluation; else the share of the latest batch of the unfinished training pass that was read last;
        else the share of the last training batch.

        The last share stays valid, since a program may train on ``x, y = next(iter(loader))`` for long. A loss that is
        equal on all ranks may get any share, since the weights of all ranks average to 1.
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


def is_alive(ref: HiddenReference[torch.Tensor]) -> bool:
    """Return whether the tensor that ``ref`` refers to is still alive."""
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
"""For each value of ``batches``, the warning that ranks share no work, with the reason and the remedy."""

FEWER_ROWS = (
    "a batch has fewer rows than samples that were fetched for it: where collate_fn leaves samples out, ranks are left "
    "with other numbers of them than their shares are weighted by. Leave them out of the data set (a Subset, a "
    "sampler), or use batches='whole'"
)


def has_fewer_rows(data: Any, share: BatchShare) -> bool:
    """Return whether ``data`` seems to have fewer samples than ``share``.

    This is so if all tensors have the same number of rows, fewer than ``share.num_mine``, and no tensor has a
    dimension of the size ``share.num_mine``. If ``data`` is None, it has no samples.
    """
    if data is None:
        return share.num_mine > 0
    found = [shape_of(tensor) for tensor in tensors(data) if tensor.dim()]
    same = len({shape[0] for shape in found}) == 1
    return same and found[0][0] < share.num_mine and not any(share.num_mine in shape for shape in found)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the tensor's shape; of a nested tensor only its number of rows, since the rows have different shapes."""
    return torch.Size([tensor.size(0)]) if tensor.is_nested else tensor.shape
