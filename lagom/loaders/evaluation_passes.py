"""``EvaluationPassDetector``: finds passes whose rows were dealt out, and that turn out to be no training.

See Note [Dealt passes].
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.errors import LagomError
from lagom.run_state.loader_pass import BatchShare, LoaderPass, is_there, tensors
from lagom.run_state.loss_terms import metadata, nodes_below, nodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch.utils.data import DataLoader

    from lagom.session.session import Session

_KEY = "lagom_use"


class _Mark:
    """Kept in the metadata of a node, and so as long as the graph."""


def first_use(session: Session, can_share: bool, loader: DataLoader[Any] | None = None) -> LoaderPass:
    """Decide what a pass that begins now, over ``loader``, is: training or evaluation, shared out or not."""
    grad = torch.is_grad_enabled()
    by_mode = grad and session.world_size > 1 and session.evaluates_by_mode()
    if by_mode and loader is not None and session.plan.batches != "whole" and session.dealt.expects_training(loader):
        by_mode = False
    training = grad and not by_mode
    shares = session.plan.batches != "whole" if training else session.plan.evaluation == "sharded"
    sharded = can_share and shares
    return LoaderPass(training=training, sharded=sharded, by_mode=by_mode)


@dataclass(eq=False)
class Use:
    """What the program does with the rows of one pass."""

    reading: weakref.ref[LoaderPass]
    place: str
    """Where the program reads, as ``file:line``."""
    serial: int
    num_batches: int = 0
    num_rows: int = 0
    trains: bool = False
    """A backward ran."""
    has_forwards: bool = False
    has_ended: bool = False
    _mark: weakref.ref[_Mark] | None = None
    """In the graph of the outputs for its first batch."""
    _inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """What the model was called with first."""

    @property
    def is_open(self) -> bool:
        """Whether there may be more of its batches."""
        return not self.has_ended and self.reading() is not None

    @property
    def mark(self) -> _Mark | None:
        """In the graph of its outputs, as long as there is one."""
        return self._mark() if self._mark is not None else None

    @property
    def may_be_trained_on(self) -> bool:
        """Whether a backward may still come: outputs or inputs of the model are kept."""
        return self.mark is not None or any(map(is_there, self._inputs))

    def forward(self, data: Any, outputs: Any) -> None:
        """A model gave ``outputs`` for ``data`` of this pass."""
        if not self.has_forwards:
            self._inputs = [weakref.ref(tensor) for tensor in tensors(data)[:1]]
        self.has_forwards = True
        nodes = [output.grad_fn for output in tensors(outputs) if output.grad_fn is not None]
        if nodes and (self._mark is None or not self.is_open):
            mark = _Mark()
            self._mark = weakref.ref(mark)
            for node in nodes:
                metadata(node)[_KEY] = mark


class EvaluationPassDetector:
    """Follows passes whose rows were dealt out because they seemed to be training.

    Args:
        share_of: the share of the batch that data comes from, where that is known.
        say_once: tells the user something, the first time.
    """

    def __init__(self, share_of: Callable[[Any], BatchShare | None], say_once: Callable[[str], None]) -> None:
        self._share_of = share_of
        self._say_once = say_once
        self._pending: list[Use] = []
        """Passes without a backward as yet."""
        self._last: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """By data set: the last use of it by the place it was read at, as a hash of the whole stack."""
        self._num_passes = 0
        self._last_evaluation = 0

    def expects_training(self, loader: DataLoader[Any]) -> bool:
        """Whether a pass over ``loader`` that begins now in eval mode is training all the same.

        It is if the last one there was, and the mode is what an evaluation in between has left.
        """
        use = self._last.get(_key(loader), {}).get(_stack()[0])
        return use is not None and use.trains and use.serial < self._last_evaluation

    def began(self, loader: DataLoader[Any], current: LoaderPass, *, follows: bool) -> None:
        """The pass ``current`` over ``loader`` begins; with ``follows`` its rows are dealt out.

        Raises:
            LagomError: when an earlier one turns out to be no training.
        """
        self.judge()
        self._num_passes += 1
        if not current.training:
            self._last_evaluation = self._num_passes
        if not follows:
            return
        stack, place = _stack()
        current.use = Use(weakref.ref(current), place, self._num_passes)
        self._last.setdefault(_key(loader), {})[stack] = current.use
        self._pending.append(current.use)

    def yielded(self, current: LoaderPass, share: BatchShare | None, num_rows: int) -> None:
        """The program sees a batch of ``current``."""
        if (use := current.use) is not None and share is not None:
            share.use = use
            use.num_batches += 1
            use.num_rows += num_rows

    def forward(self, data: Any, outputs: Any) -> None:
        """A model gave ``outputs`` for ``data``."""
        if not self._pending or any(map(_is_wrapped, tensors(outputs))):  # by torch.func, which has no backward
            return
        share = self._share_of(data)
        use = next((use for use in reversed(self._pending) if use.is_open), None) if share is None else share.use
        if use in self._pending and use is not None:
            use.forward(data, outputs)

    def backward(self, roots: Sequence[Any]) -> None:
        """A backward from ``roots`` is about to run."""
        if not self._pending:
            return
        marks = {id(mark) for use in self._pending if not use.is_open and (mark := use.mark) is not None}
        found = {id(metadata(node).get(_KEY)) for node in nodes_below(nodes_of(roots))} if marks else set()
        for use in self._pending:
            use.trains = use.is_open or not use.has_forwards or id(use.mark) in marks & found
        self._pending = [use for use in self._pending if not use.trains]

    def ended(self, current: LoaderPass) -> None:
        """The pass is exhausted.

        Raises:
            LagomError: when it turns out to be no training.
        """
        use = current.use
        if use is None or use.trains:
            return
        use.has_ended = True
        if use.has_forwards and not use.may_be_trained_on:
            self._refuse(use)

    def judge(self, *, at_end: bool = False) -> None:
        """Look at passes that are over; with ``at_end`` the program is.

        Raises:
            LagomError: when one turns out to be no training.
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

    def _refuse(self, use: Use) -> None:
        self._pending.remove(use)
        text = _NO_TRAINING.format(place=use.place, batches=use.num_batches, rows=use.num_rows)
        raise LagomError(text) from None


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _key(loader: DataLoader[Any]) -> Any:
    try:
        weakref.ref(loader.dataset)
    except TypeError:  # a list
        return loader
    return loader.dataset


def _stack() -> tuple[int, str]:
    """Where the program reads: a hash of the stack outside of torch and lagom, and the file and line."""
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
# Whether a pass over a loader is training shows when it trains. Its first batch must be dealt out, or not, before
# that, by what can be seen when it begins: gradients on, a model in training mode. Frameworks set both inside the
# loop, and first programs set neither, so that an evaluation may be dealt out: its program then has a part of the
# predictions, and divides by the length of the data set. That cannot be mended after the fact, but it can be said:
#
#  - A pass that is exhausted, in which a model was called and no backward ran, is an error, there and then.
#  - Unless a backward may still come: a loss summed over the epoch, whose graph is alive; rows that are kept, to be
#    trained on later. The error then comes when the next pass begins, the graph and the rows being gone, or at the end
#    of the program. A backward settles it that reaches the outputs for the first batch (a mark in the graph tells).
#  - A pass that the program leaves before its end counts likewise, from its second batch on: with one batch
#    programs look at shapes, or have lazy modules make their parameters.
#  - Where no model was called nothing is known of what became of the rows (counted, kept, given to another
#    library), and that is told, not refused.
#
# In the other direction, an evaluation that sets eval mode leaves it behind, and a training loop that sets its own mode
# inside begins in it: it would be taken for evaluation. If the last pass over the same data set, begun from the
# same place in the program (the whole stack, since frameworks have one loop for all), trained, and an evaluation has
# come in between, the mode is what is left of that, and the pass is dealt out.
