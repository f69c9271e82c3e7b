"""``EvaluationPassDetector``: find passes that were split as training but turn out to be evaluations.

``classify_pass`` in ``pass_starter.py`` decides at the beginning of a pass. See Note [Dealt passes].
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.errors import LagomError
from lagom.patching.object_reference import HiddenReference, tensor_dictionary
from lagom.run_state.batch_contents import tensors
from lagom.run_state.loader_pass import is_alive
from lagom.run_state.loss_terms import find_nodes, metadata, root_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import BatchShare, LoaderPass

_KEY = "lagom_use"


class _Mark:
    """A mark in the metadata of an autograd node; it lives as long as the graph."""


@dataclass(eq=False)
class PassUse:
    """Records how the program uses the rows of one pass: whether a model was called with them, and a backward ran."""

    reading: weakref.ref[LoaderPass]
    place: str
    """Place of the program that reads the loader, as ``file:line``."""
    serial: int
    num_batches: int = 0
    num_rows: int = 0
    trains: bool = False
    """Whether a backward has shown that the pass is training; see ``record_backward``."""
    has_forwards: bool = False
    has_ended: bool = False
    _mark: weakref.ref[_Mark] | None = None
    """Mark in the graph of the model's first outputs; after the end of the pass, of its latest ones."""
    _inputs: list[HiddenReference[torch.Tensor]] = field(default_factory=list)
    """The first tensor that the model was called with, by weak reference; empty before the first forward."""

    @property
    def is_open(self) -> bool:
        """Return whether the pass may have more batches."""
        return not self.has_ended and self.reading() is not None

    @property
    def mark(self) -> _Mark | None:
        """The mark in the graph of the outputs, as long as the graph lives."""
        return self._mark() if self._mark is not None else None

    @property
    def may_be_trained_on(self) -> bool:
        """Return whether a backward may still come: outputs or inputs of the model are alive."""
        return self.mark is not None or any(map(is_alive, self._inputs))

    def record_forward(self, data: Any, outputs: Any) -> None:
        """Record that a model computed ``outputs`` for ``data`` of this pass."""
        if not self.has_forwards:
            self._inputs = [HiddenReference(tensor) for tensor in tensors(data)[:1]]
        self.has_forwards = True
        nodes = [output.grad_fn for output in tensors(outputs) if output.grad_fn is not None]
        if nodes and (self._mark is None or not self.is_open):
            mark = _Mark()
            self._mark = weakref.ref(mark)
            for node in nodes:
                metadata(node)[_KEY] = mark


class EvaluationPassDetector:
    """Tracks passes that were split because they seemed to be training.

    With evaluation="sharded" no pass is tracked, since evaluations are then split on purpose.

    Args:
        share_of: returns the share of the batch that some data comes from, or None if it is unknown.
        say_once: logs a warning, unless the same text was logged before.
    """

    def __init__(self, share_of: Callable[[Any], BatchShare | None], say_once: Callable[[str], None]) -> None:
        self._share_of = share_of
        self._say_once = say_once
        self._pending: list[PassUse] = []
        """Passes without a backward so far."""
        self._last: WeakIdKeyDictionary = tensor_dictionary()
        """For each data set the last use, by the place of the program that reads it (a hash of the call stack)."""
        self._num_passes = 0
        self._last_evaluation = 0

    def expects_training(self, loader: DataLoader[Any]) -> bool:
        """Return whether a pass over ``loader`` that begins now in eval mode is training nevertheless.

        This is so if the last pass over the same data set from the same place of the program trained, and an evaluation
        began since, which may have left eval mode on.
        """
        use = self._last.get(_dataset_key(loader), {}).get(_find_reader()[0])
        return use is not None and use.trains and use.serial < self._last_evaluation

    def begin_pass(self, loader: DataLoader[Any], current: LoaderPass, *, follows: bool) -> None:
        """Record that the pass ``current`` over ``loader`` begins; with ``follows``, track the use of its rows.

        ``follows`` is true if the pass is split because it seems to be training.

        Raises:
            LagomError: if an earlier pass that was split as training turns out to be an evaluation.
        """
        self.judge()
        self._num_passes += 1
        if not current.training:
            self._last_evaluation = self._num_passes
        if not follows:
            return
        stack, place = _find_reader()
        current.use = PassUse(weakref.ref(current), place, self._num_passes)
        self._last.setdefault(_dataset_key(loader), {})[stack] = current.use
        self._pending.append(current.use)

    def record_batch(self, current: LoaderPass, share: BatchShare | None, num_rows: int) -> None:
        """Record that the program sees a batch of ``current``."""
        if (use := current.use) is not None and share is not None:
            share.use = use
            use.num_batches += 1
            use.num_rows += num_rows

    def record_forward(self, data: Any, outputs: Any) -> None:
        """Record that a model computed ``outputs`` for ``data``."""
        if not self._pending or any(map(_is_wrapped, tensors(outputs))):  # by torch.func, which runs no backward
            return
        share = self._share_of(data)
        use = next((use for use in reversed(self._pending) if use.is_open), None) if share is None else share.use
        if use in self._pending and use is not None:
            use.record_forward(data, outputs)

    def record_backward(self, roots: Sequence[Any]) -> None:
        """Record that a backward from ``roots`` is about to run."""
        if not self._pending:
            return
        marks = {id(mark) for use in self._pending if not use.is_open and (mark := use.mark) is not None}
        found = {id(metadata(node).get(_KEY)) for node in find_nodes(root_nodes(roots))} if marks else set()
        for use in self._pending:
            use.trains = use.is_open or not use.has_forwards or id(use.mark) in marks & found
        self._pending = [use for use in self._pending if not use.trains]

    def end_pass(self, current: LoaderPass) -> None:
        """Record that the pass is exhausted.

        Raises:
            LagomError: if it turns out to be an evaluation.
        """
        use = current.use
        if use is None or use.trains:
            return
        use.has_ended = True
        if use.has_forwards and not use.may_be_trained_on:
            self._refuse(use)

    def judge(self, *, at_end: bool = False) -> None:
        """Judge passes that are exhausted or dropped; with ``at_end`` all passes.

        A pass of several batches without a forward and a backward is only warned about.

        Raises:
            LagomError: if a pass that was split as training turns out to be an evaluation.
        """
        for use in list(self._pending):
            if use.is_open and not at_end:
                continue
            counts = use.has_ended or use.num_batches > 1
            if use.has_forwards and counts:
                if at_end or not use.may_be_trained_on:
                    self._refuse(use)
                continue
            self._pending.remove(use)
            if use.num_batches > 1:
                self._say_once(_NO_BACKWARD.format(place=use.place))

    def _refuse(self, use: PassUse) -> None:
        self._pending.remove(use)
        text = _NO_TRAINING.format(place=use.place, batches=use.num_batches, rows=use.num_rows)
        raise LagomError(text) from None


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _dataset_key(loader: DataLoader[Any]) -> Any:
    try:
        weakref.ref(loader.dataset)
    except TypeError:  # a list has no weak references
        return loader
    return loader.dataset


def _find_reader() -> tuple[int, str]:
    """Return the place that reads the loader: a hash of its call stack, and its ``file:line``.

    The stack begins at the innermost frame outside of torch and lagom.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "lagom"):
        frame = frame.f_back
    place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    calls = []
    while frame is not None:
        calls.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return hash(tuple(calls)), place


_NO_TRAINING = (
    "the pass over a data loader at {place} called a model and ran no backward(): it was no training. It began with "
    "gradients on and the model in training mode, so it was taken for training and its batches were dealt out: this "
    "rank saw {rows} rows in {batches} batches, its share, and what the program makes of them (predictions, metrics, "
    "features) is not what one process has. Call model.eval() or enter torch.no_grad() before the loop begins, not "
    "inside it; or use batches='whole', with which every rank sees whole batches"
)
_NO_BACKWARD = (
    "batches of the data loader read at {place} came and went without a backward(). Each rank saw its share of them, "
    "so what is computed from them is the rank's own: use torch.no_grad() around a loop that only looks at the data, "
    "and batches='whole' where gradients come from torch.func"
)


# Note [Dealt passes]
#
# A pass over a loader shows that it is training only when a backward runs. Whether its first batch is split must be
# decided earlier, by the facts at its beginning: gradients on, a model in training mode. Frameworks set both inside the
# loop, and programs of beginners set neither, so an evaluation may be split by mistake. The program then has only a
# part of the predictions, but divides by the length of the data set. This cannot be repaired later, but it can be
# reported:
#
# - A pass that ends after a forward and without a backward is an error at once.
# - The error is delayed while a backward may still come: for a loss summed over the epoch, whose graph is alive, or for
#   rows that are kept to be trained on later. The error comes when the next pass begins and the graph and the rows are
#   gone, or at the end of the program. While a pass goes on, any backward shows that it is training; after its end,
#   only a backward that reaches a mark, in the graph of the outputs for the first batch or of outputs after the end.
# - A pass that the program leaves early is judged in the same way if it has given two batches or more. One batch is no
#   evidence: programs take one to look at shapes, or to let lazy modules create their parameters.
# - Without a forward, nothing is known about the use of the rows (counted, kept, given to another library), so the user
#   is warned, after two batches or more.
#
# The opposite mistake: an evaluation leaves the model in eval mode. A training loop that calls model.train() inside the
# loop then begins in eval mode, and would be taken for an evaluation. The pass is split nevertheless if the last pass
# over the same data set from the same place in the program trained, and an evaluation came in between. The place is
# the whole call stack, since frameworks have one loop for all passes.
