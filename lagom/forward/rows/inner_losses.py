"""Losses inside a forward that is split by rows. See Note [Losses inside]."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes as disabled_modes

from lagom.forward.rows.comparison import are_close, drop_rows
from lagom.forward.rows.draws import BranchMismatchError
from lagom.forward.rows.row_functions import gather_blocks
from lagom.forward.rows.shared_loss import (
    ERRORS,
    MEAN,
    NONE,
    SUM,
    LossArithmetic,
    RowReduction,
    TorchLoss,
    any_rank,
    exchanges_of,
    sum_over_ranks,
)
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.inspection.reads import is_tensor
from lagom.patching.watched_operations import REDUCTIONS, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch._ops import OpOverload

    from lagom.forward.rows.recorder import Recorder
    from lagom.forward.rows.whole_batch import RowBlock, RowExchange

    Original = Callable[..., Any]
    Loss = TorchLoss | RowReduction

_running = threading.local()
"""``losses``: what computes the losses of the forward that runs in this thread; None if torch does."""
_NO_MORE: Any = object()
"""Marks a loss after the last of the probe."""


@dataclass(frozen=True)
class InnerLoss:
    """A loss of the batch that a forward has computed in its probe."""

    name: str
    """Name of torch's operation."""
    factor: int
    """Number of rows of the scores for each row of the batch."""
    value: Tensor
    """The loss of the whole batch."""


class InnerLosses:
    """Base of what computes the losses of one forward, in their order.

    Args:
        losses: for each of torch's losses, and each sum or mean of all elements of a tensor, the loss of the batch;
            None for other losses.
    """

    def __init__(self, losses: Sequence[InnerLoss | None]) -> None:
        self._expected = iter(losses)
        self.has_reductions = any(loss is not None and loss.name in REDUCTIONS for loss in losses)
        """Whether sums and means are losses."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context manager in which ``compute`` is called for torch's losses."""
        return _entered(self)

    @torch._disable_dynamo  # which would compile this function where it runs between compiled parts of a forward
    def reduce(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that adds elements, by ``compute`` if it makes one number of them in the forward."""
        reduction = RowReduction(function)
        is_backward = torch._C._current_graph_task_id() != -1
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        is_transformed = is_traced or torch._C._functorch.peek_interpreter_stack() is not None
        is_own = current_losses() is self and not is_backward and not is_transformed
        if not is_own or not reduction.makes_one_number(args, kwargs):
            return function(*args, **kwargs)
        return self.compute(reduction, function, args, kwargs)

    def compute(self, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss ``original(*args, **kwargs)`` of the whole batch.

        Raises:
            NotByRowsError: in a probe, if it cannot be computed from the losses of rows.
            BranchMismatchError: in a sliced forward, on all ranks, if it is not as in the probe.
        """
        expected = next(self._expected, _NO_MORE)
        if expected is _NO_MORE:
            self.refuse()
        with _entered(None):
            if expected is None:
                return original(*args, **kwargs)
            return self.loss_of_batch(expected, loss, original, args, kwargs)

    def loss_of_batch(
        self, expected: InnerLoss, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a loss of the batch."""
        raise NotImplementedError

    def refuse(self) -> NoReturn:
        """Raise the error for a loss that the forward did not compute in its probe."""
        raise NotByRowsError(WholeReason.LOSS_NOT_BY_ROWS)


@contextmanager
def _entered(losses: InnerLosses | None) -> Iterator[None]:
    before = current_losses()
    _running.losses = losses
    reduces = losses is not None and losses.has_reductions
    try:
        with watched(losses.reduce, of_reductions=True) if losses is not None and reduces else nullcontext():
            yield
    finally:
        _running.losses = before


def current_losses() -> InnerLosses | None:
    """Return what computes the losses of the forward that runs in this thread; None if torch does."""
    losses: InnerLosses | None = getattr(_running, "losses", None)
    return losses


class Sums(Enum):
    """Sums and means in a forward that are losses of the batch."""

    ALL = 1
    OF_PARAMETERS = 2
    """Not those of tensors that no parameter changes, such as masks: the forward may read these."""
    NONE = 3


class WholeLosses(InnerLosses):
    """Lets torch compute the losses of a whole batch, and notes those of the batch."""

    def __init__(self, recorder: Recorder, rows: int, sums: Sums) -> None:
        super().__init__(())
        self.has_reductions = sums is not Sums.NONE
        self._recorder = recorder
        self._rows = rows
        self._adds_constants = sums is Sums.ALL
        self.has_added = False
        """Whether a sum or mean is a loss."""
        self.has_added_constants = False
        """Whether the sum or mean of a tensor that no parameter changes is a loss."""
        self._losses: list[InnerLoss | None] = []
        self._of_torch: list[InnerLoss | None] = []
        self.arguments: list[tuple[Tensor, ...]] = []
        """Tensors with rows of each loss of the batch: scores and targets, or the elements of a sum or mean."""

    @property
    def losses(self) -> Sequence[InnerLoss | None]:
        """The losses, without sums and means if none of these is one: the other runs do not watch them then."""
        return self._losses if self.has_added else self._of_torch

    def compute(self, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss."""
        noted = set(self._recorder.numbers)
        with _entered(None):
            result = original(*args, **kwargs)
        of_rows = _tensors_with_rows(loss, args)
        follows = any(map(self._follows, of_rows))
        if not follows or result.dim() or (isinstance(loss, RowReduction) and not self._adds(loss, args, kwargs)):
            self._note(loss, None)
            return result
        if isinstance(loss, TorchLoss):
            self._check(loss, args, kwargs)
        with disabled_modes():
            value = result.detach().clone()
            self.arguments.append(tuple([tensor.detach().clone() for tensor in of_rows]))
        self._note(loss, InnerLoss(loss.name, of_rows[0].shape[0] // self._rows, value))
        self._recorder.numbers = noted  # a loss that is composed of operations may divide by the number of rows
        self._recorder.count_as_whole(result)
        return result

    def _note(self, loss: Loss, found: InnerLoss | None) -> None:
        self._losses.append(found)
        if isinstance(loss, RowReduction):
            self.has_added |= found is not None
        else:
            self._of_torch.append(found)

    def _check(self, loss: TorchLoss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scores = args[0]
        is_cut = scores.dim() > 0 and scores.shape[0] and scores.shape[0] % self._rows == 0
        has_weights = any(self._follows(args[i]) for i in loss.weights) or any(map(is_tensor, kwargs.values()))
        if has_weights or not is_cut or not _has_rows(loss, args):
            raise NotByRowsError(WholeReason.LOSS_NOT_BY_ROWS)

    def _adds(self, loss: RowReduction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a sum or mean is a loss."""
        if not loss.has_rows(args, kwargs, self._rows):
            return False
        if not self._recorder.is_constant(args[0]):
            return True
        self.has_added_constants = self._adds_constants
        return self._adds_constants

    def _follows(self, argument: Any) -> bool:
        return is_tensor(argument) and self._recorder.follows_input(argument)


class RepeatedLosses(InnerLosses):
    """Gives the losses of the whole batch again."""

    def loss_of_batch(
        self, expected: InnerLoss, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the loss in the probe's run on the whole batch."""
        with disabled_modes():
            return expected.value.clone()


class ChangedRowLosses(RepeatedLosses):
    """Gives the losses of the whole batch again; refuses those for which another row than ``row`` has changed."""

    def __init__(self, whole: WholeLosses, row: int, tolerance: float) -> None:
        super().__init__(whole.losses)
        self._arguments = iter(whole.arguments)
        self._row = row
        self._tolerance = tolerance

    def loss_of_batch(
        self, expected: InnerLoss, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the loss in the probe's run on the whole batch."""
        own = self._row * expected.factor, (self._row + 1) * expected.factor
        with disabled_modes():
            for argument, before in zip(_tensors_with_rows(loss, args), next(self._arguments), strict=True):
                if not are_close(drop_rows(argument.detach(), *own), drop_rows(before, *own), self._tolerance):
                    raise NotByRowsError(WholeReason.MIXES_ROWS)
        return super().loss_of_batch(expected, loss, original, args, kwargs)


class BlockLosses(RepeatedLosses):
    """Gives the losses of the whole batch again, and notes the sums of one block's losses."""

    def __init__(self, losses: Sequence[InnerLoss | None], block: RowBlock, recorder: Recorder) -> None:
        super().__init__(losses)
        self._recorder = recorder
        self._block = block
        self.sums: list[tuple[Tensor, Any]] = []
        """Sum of the losses, and the number by which it is divided for a mean; None for a sum."""

    def loss_of_batch(
        self, expected: InnerLoss, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the loss in the probe's run on the whole batch."""
        if not _is_alike(expected, loss, args, self._block):
            raise NotByRowsError(WholeReason.LOSS_NOT_BY_ROWS)
        with disabled_modes(), torch.no_grad():
            self.sums.append(self._sum(loss, original, args, kwargs))
        result = super().loss_of_batch(expected, loss, original, args, kwargs)
        self._recorder.count_as_whole(result)
        return result

    def _sum(self, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        if isinstance(loss, RowReduction):
            return loss.of_block(args[0])
        arithmetic = LossArithmetic(loss, args)
        total = original(*_with_reduction(loss, args, SUM), **kwargs).clone()
        return total, arithmetic.divisor(args[0].numel()) if arithmetic.reduction == MEAN else None


def compare_losses(losses: Sequence[InnerLoss | None], blocks: Sequence[BlockLosses], tolerance: float) -> None:
    """Compare the losses of the batch with the sums of all blocks' losses.

    Raises:
        NotByRowsError: when they differ.
    """
    wholes = [loss.value for loss in losses if loss is not None]
    if any(len(block.sums) != len(wholes) for block in blocks):
        raise NotByRowsError(WholeReason.LOSS_NOT_BY_ROWS)
    for whole, parts in zip(wholes, zip(*[block.sums for block in blocks], strict=True), strict=True):
        total = torch.stack([block_sum for block_sum, _ in parts]).sum()
        divisors = [divisor for _, divisor in parts if divisor is not None]
        if not are_close((total / sum(divisors) if divisors else total).to(whole.dtype), whole, tolerance):
            raise NotByRowsError(WholeReason.LOSS_NOT_BY_ROWS)


class RankLosses(InnerLosses):
    """Computes the losses of the batch from those of each rank's rows.

    Args:
        left_alone: returns a context manager in which draws and reads are not the forward's.
        signed: bytes of the input, which must be equal on all ranks.
    """

    def __init__(
        self,
        losses: Sequence[InnerLoss | None],
        exchange: RowExchange,
        left_alone: Callable[[], AbstractContextManager[None]],
        signed: bytes,
    ) -> None:
        super().__init__(losses)
        self._signed = signed
        self._left_alone = left_alone
        self._rows, self._ranks = exchanges_of(exchange)
        self._left = sum(loss is not None for loss in losses)
        self._has_mismatch = False

    def loss_of_batch(
        self, expected: InnerLoss, loss: Loss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the loss, on all ranks; a collective."""
        self._left -= 1
        if self._has_mismatch or not _is_alike(expected, loss, args, self._rows.block):
            self.refuse()
        with self._left_alone():
            if isinstance(loss, RowReduction):
                return loss.over_ranks(args, kwargs, expected.factor, (self._rows, self._ranks), self._signed)
            return self._add_over_ranks(expected, loss, original, args, kwargs)

    def _add_over_ranks(
        self, expected: InnerLoss, loss: TorchLoss, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        block = self._rows.block
        scores, targets = args[:2]
        is_cpu = scores.device.type == "cpu"
        is_listed = LossArithmetic(loss, args).keeps_bits
        row_losses: Tensor | None = None
        # On a CPU an error is suppressed: all ranks then run the forward whole, which raises it as one process does.
        with suppress(*ERRORS) if is_cpu else nullcontext():
            row_losses = original(*_with_reduction(loss, args, NONE if is_listed else SUM), **kwargs)
        if is_cpu and any_rank(self._ranks, row_losses is None, self._signed):
            self.refuse()
        assert row_losses is not None
        if is_listed:
            losses, all_targets = gather_blocks([row_losses, targets], self._rows, [expected.factor] * 2)
            return LossArithmetic(loss, (scores, all_targets, *args[2:])).reduce(losses)
        if loss.of_classes and not targets.is_floating_point():
            (targets,) = self._rows.gather([targets], [expected.factor])
        arithmetic = LossArithmetic(loss, (scores, targets, *args[2:]))
        num_scores = scores.numel() // block.num_mine * block.num_all
        return sum_over_ranks(row_losses, arithmetic, num_scores, self._ranks, None)[0]

    def end(self) -> None:
        """End the forward.

        Raises:
            BranchMismatchError: when it has computed other losses than in its probe, also if its code has caught the
                error.
        """
        if self._has_mismatch or self._left:
            raise BranchMismatchError

    def refuse(self) -> NoReturn:
        """Have the forward run whole, on all ranks."""
        self._has_mismatch = True
        raise BranchMismatchError


def _tensors_with_rows(loss: Loss, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that have rows: scores and targets, or the elements of a sum or mean."""
    return args[: 1 if isinstance(loss, RowReduction) else 2]


def _is_alike(expected: InnerLoss, loss: Loss, args: tuple[Any, ...], block: RowBlock) -> bool:
    """Return whether a loss of a block is the ``expected`` one of the run on the whole batch."""
    scores = args[0]
    return (
        loss.name == expected.name
        and isinstance(scores, torch.Tensor)
        and scores.dim() > 0
        and scores.shape[0] == expected.factor * block.num_mine
        and (isinstance(loss, RowReduction) or _has_rows(loss, args))
    )


def _has_rows(loss: TorchLoss, args: tuple[Any, ...]) -> bool:
    return len(args) > loss.reduction and args[loss.reduction] in (MEAN, SUM) and loss.has_rows(args)


def _with_reduction(loss: TorchLoss, args: tuple[Any, ...], reduction: int) -> tuple[Any, ...]:
    return (*args[: loss.reduction], reduction, *args[loss.reduction + 1 :])


# Note [Losses inside]
#
# A model may compute its loss in its forward, as Hugging Face's do where they get labels: an output that has no rows.
# If the loss is one of torch's, and a sum or mean over rows, each rank computes the losses of its rows, and they are
# added as in Note [Losses by rows] in row_losses.py. A program may also add the rows itself, by ``mean()`` or ``sum()``
# of all elements of a tensor: the kernels of patching/watched_operations.py show these. Ranks exchange the rows of a
# small tensor, whose sum then has the bits of one process, and the sums of a large one. A sum of a mask is a loss too,
# as in ``(losses * mask).sum() / mask.sum()``, unless the forward reads it (``.item()``): then a second probe leaves it
# to Note [Reads of the input] in input_reads.py. If the forward cannot be split so, a last probe counts no sum as a
# loss: rows may be added for their gradient alone (``autograd.grad(y.sum(), x)``).
#
# A loss that is zero in the probe would hide what it is divided by: ``beta * sum / len(x)`` with a beta that grows
# later. So the recorder notes the numbers among the arguments of operations on losses, and scalars that scale rows;
# they must be equal for the batch and its blocks. Once Dynamo has compiled something, sums are no losses: compiled code
# hides them.
#
# The result is equal on all ranks, and so is what the forward computes from it; it may not meet rows again, since its
# gradient would then be that of a rank's rows. In a probe, the run on the whole batch notes each loss. In the other
# runs the losses are these again, since a block has only its own rows; the sums of all blocks must give them.
