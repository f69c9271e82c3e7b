"""``SharedLoss``: each rank computes a loss for its rows, and the ranks' losses are added."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from lagom.errors import LagomError
from lagom.forward.rows.row_functions import gather_blocks, is_batched
from lagom.forward.rows.whole_batch import RowBlock, RowExchange, row_block
from lagom.inspection.reads import is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

    from lagom.forward.rows.path_to_output import GradientPath

NONE, MEAN, SUM = range(3)
"""Reductions as torch's operations take them."""
SUMMED = (torch.float32, torch.float64)
"""Types of losses that are summed over ranks; in shorter ones a sum overflows where the mean does not."""
ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
_MAX_GATHERED = 2**16
"""Bytes of a tensor up to which ranks exchange its rows, and not sums: the result has the bits of one process."""
_MEANS = {"SumBackward0": "MeanBackward0", "NegBackward0": "DivBackward1"}
"""Printed name of the graph node of a loss that is summed, and of the node that torch has for its mean."""
_BATCHED = (
    "several gradients at once (is_grads_batched) of the loss of a large output cannot be taken on several ranks; take "
    "one after another"
)
_PLACE = "the sum of a loss"


@dataclass(frozen=True)
class TorchLoss:
    """One of torch's operations that compute a loss.

    Args:
        owner: the module that has the operation as its attribute ``name``.
        reduction: position of the argument for the reduction: none, mean or sum.
        weights: positions of arguments that may be weights, and have no rows.
        of_classes: whether it takes scores of classes: its mean is weighted, and it has one loss for each target.
    """

    owner: Any
    name: str
    reduction: int
    weights: tuple[int, ...] = ()
    of_classes: bool = False

    def has_rows(self, args: Sequence[Any]) -> bool:
        """Return whether the loss of these arguments can be computed by rows.

        Scores and targets alone must have a row for each sample, only scores may need a gradient, and sums of losses
        over ranks must be exact enough for the reduction and the type of the scores.
        """
        scores, targets = args[:2]
        weights = [args[i] for i in self.weights if args[i] is not None]
        if targets.requires_grad or not all(isinstance(one, Tensor) and not one.requires_grad for one in weights):
            return False
        if scores.dtype not in SUMMED and not torch.is_autocast_enabled(scores.device.type):
            return False
        if args[self.reduction] not in ((NONE, MEAN, SUM) if self.of_classes else (MEAN, SUM)):
            return False
        if self.of_classes:
            return bool(scores.dim() > 1 and targets.dim() > 0 and targets.shape[0] == scores.shape[0])
        return bool(targets.shape == scores.shape) and all(weight.dim() < scores.dim() for weight in weights)


class LossArithmetic:
    """Computes a loss of a whole batch from the losses of its parts, as torch's operation does from its arguments.

    Args:
        args: the operation's arguments, of the whole batch.
    """

    def __init__(self, loss: TorchLoss, args: Sequence[Any]) -> None:
        self._of_classes = loss.of_classes
        self._args = args
        self.reduction: int = args[loss.reduction]
        smoothing = args[5] if loss.of_classes and len(args) > 5 else 0.0
        self.keeps_bits = loss.of_classes and not args[1].is_floating_point() and not smoothing
        """Whether the loss is computed from one for each target: the sum then has the bits of one process."""

    def reduce(self, losses: Tensor) -> Tensor:
        """Return the sum or mean of all losses, added by torch's own operation: the bits are those of one process."""
        targets, weight = self._args[1:3]
        total = self._add(losses)
        if self.reduction == MEAN:
            counts = targets != self._args[4]
            total = total / (counts.sum() if weight is None else self._add(weight[targets.long().where(counts, 0)]))
        name = "NllLossBackward0" if targets.dim() == 1 else "NllLoss2DBackward0"
        reduced: Tensor = _function(NamedFunction, name).apply(total)
        return reduced

    def divisor(self, num_scores: int) -> Any:
        """Return the number by which torch divides the sum of the losses of ``num_scores`` scores to get their mean."""
        scores, targets, *others = self._args
        if not self._of_classes:
            return num_scores
        if targets.is_floating_point():  # probabilities of classes
            return num_scores // scores.shape[1]
        weight, ignored = others[0], others[2]
        counts = targets != ignored
        if weight is None:
            return counts.sum()
        return weight[targets.long().where(counts, 0)].where(counts, 0).sum()

    def _add(self, numbers: Tensor) -> Tensor:
        """Add ``numbers``, one for each target, without those of ignored targets."""
        targets, ignored = self._args[1], self._args[4]
        classes = torch.zeros_like(targets).masked_fill(targets == ignored, -100)
        add: Any = torch._C._nn.nll_loss_nd  # the patch has no effect: no path leads to these numbers
        total: Tensor = add(-numbers.unsqueeze(1), classes, None, SUM, -100)
        return total


@dataclass(frozen=True)
class RowReduction:
    """One of torch's operations that add the elements of a tensor."""

    function: OpOverload

    @property
    def name(self) -> str:
        """Name of torch's operation."""
        name: str = self.function.name()
        return name

    @property
    def reduction(self) -> int:
        """Whether it is a mean or a sum, as torch's losses name them."""
        return MEAN if self.name.startswith("aten::mean") else SUM

    def divisor(self, num_elements: int) -> int:
        """Return the number by which the sum of ``num_elements`` is divided for their mean."""
        return num_elements

    def makes_one_number(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether the operation, with these arguments, makes a tensor of shape () of several elements."""
        tensor = args[0]
        if not (is_tensor(tensor) and tensor.layout == torch.strided and tensor.dim()) or tensor.is_nested:
            return False
        if "." not in self.name:
            return True
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        keeps = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        return not keeps and (not dims or {dim % tensor.dim() for dim in dims} == set(range(tensor.dim())))

    def has_rows(self, args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> bool:
        """Return whether the result can be computed from rows, where ``args`` are those of the whole batch."""
        (tensor, *others) = args
        if not tensor.shape[0] or tensor.shape[0] % rows:
            return False
        return tensor.nbytes <= _MAX_GATHERED or self._adds_exactly(tensor, others, kwargs)

    def _adds_exactly(self, tensor: Tensor, others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether sums of ranks, which keep the type of ``tensor``, are exact enough."""
        is_exact = tensor.dtype in SUMMED or not (tensor.is_floating_point() or tensor.is_complex())
        return is_exact and not any(isinstance(one, torch.dtype) for one in (*others, *kwargs.values()))

    def of_block(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return the sum of a block, and the number by which it is divided for a mean; None for a sum."""
        return tensor.sum(), tensor.numel() if self.reduction == MEAN else None

    def over_ranks(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        factor: int,
        exchanges: tuple[RowExchange, RowExchange],
        signed: bytes,
    ) -> Tensor:
        """Return the result for the whole batch from this rank's rows; a collective.

        Args:
            factor: number of rows of the tensor for each row of the batch.
            exchanges: those of ``exchanges_of``.
            signed: bytes that must be equal on all ranks.
        """
        (tensor, *others), (rows, ranks) = args, exchanges
        is_small = _whole_size(tensor.shape, rows.block) * tensor.element_size() <= _MAX_GATHERED
        if is_small or not self._adds_exactly(tensor, others, kwargs):  # it may have been smaller in the probe
            (whole,) = gather_blocks([tensor], rows, [factor], signed)
            result: Tensor = self.function(whole, *args[1:], **kwargs)
            return result
        return sum_over_ranks(tensor.sum(), self, _whole_size(tensor.shape, rows.block), ranks, None, signed)[0]


def _whole_size(shape: Sequence[int], block: RowBlock) -> int:
    """Return the number of elements of a tensor for the whole batch, which has this ``shape`` for a block."""
    return math.prod(shape) // block.num_mine * block.num_all


def sum_over_ranks(
    found: Tensor,
    arithmetic: LossArithmetic | RowReduction,
    num_scores: int,
    ranks: RowExchange,
    failed: bool | None,
    signed: bytes = b"",
) -> tuple[Tensor, bool]:
    """Return the sum, or the mean, of the losses of all ranks, and whether one has failed; a collective.

    Args:
        found: the sum of the losses of this rank's rows.
        num_scores: number of scores of the whole batch.
        ranks: exchange of one row for each rank.
        failed: whether this rank has failed; None if that is not exchanged.
        signed: bytes that must be equal on all ranks.
    """
    name = "" if found.grad_fn is None else found.grad_fn.name()
    if arithmetic.reduction == MEAN:
        name, found = _MEANS.get(name, name), found / arithmetic.divisor(num_scores)
    total, has_failed = _function(SumFunction, name).apply(found, ranks, failed, signed)
    return total, has_failed


class SharedLoss:
    """Computes one of torch's losses: each rank for its rows, and the ranks' sums are added."""

    def __init__(
        self,
        loss: TorchLoss,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        path: GradientPath,
    ) -> None:
        self._loss = loss
        self._original = original
        self._args = args
        self._kwargs = kwargs
        self._path = path
        self._arithmetic = LossArithmetic(loss, args)
        exchange: RowExchange = path.gather.exchange
        self._rows, self._ranks = exchanges_of(exchange)

    def compute(self) -> Tensor | None:
        """Return the loss; None on all ranks if any rank cannot compute its rows on a CPU. A collective."""
        scores, targets, *others = self._args
        factor, arithmetic = self._path.factor, self._arithmetic
        rows = RowsFunction.apply(scores, self._path.gather.block_ends[self._path.index], self._path, self._rows)  # type: ignore[no-untyped-call]
        is_listed = arithmetic.keeps_bits or arithmetic.reduction == NONE
        others[self._loss.reduction - 2] = NONE if is_listed else SUM
        found: Tensor | None = None
        # On a CPU an error is suppressed: all ranks then compute all rows, which raises it with one process's text. On
        # a GPU all ranks raise the same error, since it does not depend on values: wrong labels are reported later.
        with suppress(*ERRORS) if scores.device.type == "cpu" else nullcontext():
            found = self._original(rows, self._rows.block.of(targets, factor), *others, **self._kwargs)
        if is_listed:
            losses = self._gather_losses(found, factor)
            return losses if losses is None or arithmetic.reduction == NONE else arithmetic.reduce(losses)
        failed = None if scores.device.type != "cpu" else found is None
        if found is None:
            found = scores.new_zeros((), dtype=scores.dtype if scores.dtype in SUMMED else torch.float32)
        total, has_failed = sum_over_ranks(found, arithmetic, scores.numel(), self._ranks, failed)
        return None if has_failed else total

    def _gather_losses(self, found: Tensor | None, factor: int) -> Tensor | None:
        if self._args[0].device.type == "cpu" and any_rank(self._ranks, found is None):
            return None
        assert found is not None
        return gather_blocks([found], self._rows, [factor])[0]


def exchanges_of(exchange: RowExchange) -> tuple[RowExchange, RowExchange]:
    """Return the exchanges for losses of each row, and for one number of each rank."""
    block = exchange.block
    ranks = row_block(block.rank, block.world_size, block.world_size)
    return RowExchange(exchange.gatherer, block, _PLACE), RowExchange(exchange.gatherer, ranks, _PLACE)


def any_rank(ranks: RowExchange, is_true: bool, signed: bytes = b"") -> bool:
    """Return whether ``is_true`` on any rank; a collective, for which ``signed`` must be equal on all ranks."""
    (found,) = ranks.gather([torch.tensor([is_true], device="cpu")], [1], signed)
    return bool(found.any())


class RowsFunction(Function):
    """This rank's rows of ``scores``; their gradient goes straight to the block of the output that they come from.

    If the program watches gradients in between, the gradient is gathered and goes back through the graph instead.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, end: Tensor, path: GradientPath, exchange: RowExchange) -> Tensor:
        ctx.path, ctx.exchange = path, exchange
        return exchange.block.of(scores, path.factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        path: GradientPath = ctx.path
        if is_batched(gradient):
            raise LagomError(_BATCHED)
        if path.gather.is_watched:
            (whole,) = gather_blocks([gradient], ctx.exchange, [path.factor])
            ctx.exchange.gatherer.clock.divide_backward(False)
            return whole / ctx.exchange.block.world_size, None, None, None
        return None, path.gradient_of_block(gradient), None, None


class SumFunction(Function):
    """Adds the ranks' numbers, and tells whether a rank failed; multiplies the gradient by the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, number: Tensor, exchange: RowExchange, failed: bool | None, signed: bytes
    ) -> tuple[Tensor, bool]:
        ctx.exchange = exchange
        numbers = [number.reshape(1)] if failed is None else [number.reshape(1), torch.tensor([failed], device="cpu")]
        totals = exchange.gather(numbers, [1] * len(numbers), signed)
        return totals[0].sum(), failed is not None and bool(totals[1].any())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None, None]:
        ctx.exchange.gatherer.clock.divide_backward(True)
        return CopyFunction.apply(gradient, ctx.exchange) * ctx.exchange.block.world_size, None, None, None  # type: ignore[no-untyped-call]


class CopyFunction(Function):
    """Copies a number that is equal on all ranks to a number of each rank's own."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total, _ = SumFunction.apply(gradient, ctx.exchange, None, b"")  # type: ignore[no-untyped-call]
        return total / ctx.exchange.block.world_size, None


class NamedFunction(Function):
    """Returns a loss unchanged; its graph node has the name of torch's operation."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@functools.cache
def _function(kind: type[Function], name: str) -> Any:
    """Return a subclass of ``kind`` whose graph node is printed with ``name``, as in one process."""
    found: Any = type(kind.__name__, (kind,), {})
    found._backward_cls.__name__ = name
    return found
