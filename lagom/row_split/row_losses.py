"""``share_losses``: each rank computes the loss of its rows of a large output, and the ranks' losses are added."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.jit._builtins
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from lagom.errors import LagomError
from lagom.patching.replace import replaced
from lagom.row_split import whole_batch
from lagom.row_split.gradient_path import GradientPath, find_gradient_path, watch_gradient
from lagom.row_split.row_functions import gather_blocks, is_batched
from lagom.row_split.whole_batch import RowBlock, RowExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

MIN_BYTES = 2**17
"""Size of scores from which sharing out their loss saves more time than an exchange takes."""
_NONE, _MEAN, _SUM = range(3)
"""Reductions as torch's operations take them."""
_SUMMED = (torch.float32, torch.float64)
"""Types of losses that are summed over ranks; in shorter ones a sum overflows where the mean does not."""
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
_MEANS = {"SumBackward0": "MeanBackward0", "NegBackward0": "DivBackward1"}
"""Names, as printed, of operations that torch has for a mean instead of those for a sum."""
_BATCHED = (
    "several gradients at once (is_grads_batched) of the loss of a large output cannot be taken on several ranks; take "
    "one after another"
)
_PLACE = "the sum of a loss"


@contextmanager
def share_losses(session: Session, knows_rank: Callable[[], bool]) -> Iterator[None]:
    """Patch torch's losses, and what watches gradients. See Note [Losses by rows].

    Args:
        knows_rank: tells whether the program has asked for its rank, and so may compute a loss on one rank alone.
    """
    sharing = _Sharing(session, knows_rank)
    with ExitStack() as stack:
        for loss in _LOSSES:
            stack.enter_context(_share_loss(sharing, loss))
        for name in ("register_hook", "retain_grad"):
            stack.enter_context(_called_before(Tensor, name, lambda tensor, *_: watch_gradient(tensor.grad_fn)))
        # These hooks of modules are on nodes of the graph.
        stack.enter_context(_called_before(nn.Module, "register_backward_hook", sharing.end))
        stack.enter_context(_called_before(nn.modules.module, "register_module_backward_hook", sharing.end))
        yield


@contextmanager
def _called_before(owner: Any, name: str, first: Callable[..., None]) -> Iterator[None]:
    """Call ``first`` before ``owner.name``, with the same positional arguments."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        first(*args)
        return original(*args, **kwargs)

    with replaced(owner, name, functools.update_wrapper(call, original)):
        yield


@dataclass(frozen=True)
class _Loss:
    """One of torch's operations that compute a loss.

    Args:
        owner: what has it as an attribute.
        reduction: position of the argument that says how losses of rows become one.
        weights: positions of arguments that may be weights, and have no rows.
        of_classes: whether it takes scores of classes: its mean is weighted, and it has one loss for each target.
    """

    owner: Any
    name: str
    reduction: int
    weights: tuple[int, ...] = ()
    of_classes: bool = False


_LOSSES = (
    _Loss(torch._C._nn, "cross_entropy_loss", 3, (2,), of_classes=True),
    _Loss(torch._C._nn, "nll_loss_nd", 3, (2,), of_classes=True),
    *(_Loss(torch._C._nn, name, 2) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    _Loss(torch._C._nn, "binary_cross_entropy", 3, (2,)),
    _Loss(torch, "binary_cross_entropy_with_logits", 4, (2, 3)),
    _Loss(torch, "kl_div", 2),
)


class _Sharing:
    """Decides which losses ranks share out."""

    def __init__(self, session: Session, knows_rank: Callable[[], bool]) -> None:
        self._session = session
        self._knows_rank = knows_rank
        self._is_over = False

    def end(self, *_: Any) -> None:
        """Share out no loss any more."""
        self._is_over = True

    def find_path(self, loss: _Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradientPath | None:
        """Return the path from an output to the scores, if each rank can compute the loss of its rows."""
        if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling() or len(args) <= loss.reduction:
            return None
        scores, targets = args[:2]
        if not (isinstance(scores, Tensor) and isinstance(targets, Tensor) and scores.requires_grad and scores.dim()):
            return None
        if not whole_batch.ALWAYS and scores.numel() * scores.element_size() < MIN_BYTES:
            return None
        if not _have_rows(loss, args) or any(isinstance(one, Tensor) for one in kwargs.values()):
            return None
        return find_gradient_path(scores) if self._may_share() else None

    def _may_share(self) -> bool:
        session = self._session
        if self._is_over or not session.may_meet or session.is_probing or session.sliced_forward is not None:
            return False
        if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled or self._knows_rank():
            return False
        # Transforms, derivatives in forward mode, tracers and modes that see each operation.
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        return not (is_transformed or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0)


def _have_rows(loss: _Loss, args: tuple[Any, ...]) -> bool:
    """Return whether scores and targets have a row for each sample, and nothing else has, or needs a gradient."""
    scores, targets = args[:2]
    weights = [args[i] for i in loss.weights if args[i] is not None]
    if targets.requires_grad or not all(isinstance(one, Tensor) and not one.requires_grad for one in weights):
        return False
    if scores.dtype not in _SUMMED and not torch.is_autocast_enabled(scores.device.type):
        return False
    if args[loss.reduction] not in ((_NONE, _MEAN, _SUM) if loss.of_classes else (_MEAN, _SUM)):
        return False
    if loss.of_classes:
        return bool(scores.dim() > 1 and targets.dim() > 0 and targets.shape[0] == scores.shape[0])
    return bool(targets.shape == scores.shape) and all(weight.dim() < scores.dim() for weight in weights)


@contextmanager
def _share_loss(sharing: _Sharing, loss: _Loss) -> Iterator[None]:
    original = getattr(loss.owner, loss.name)

    def shared(*args: Any, **kwargs: Any) -> Any:
        path = sharing.find_path(loss, args, kwargs)
        found = None if path is None else _SharedLoss(loss, original, args, kwargs, path).compute()
        return original(*args, **kwargs) if found is None else found

    # Pickled by these names.
    shared.__module__, shared.__qualname__, shared.__name__ = loss.owner.__name__, loss.name, loss.name
    # So that torch.jit.script, which compiles torch's Python, takes it for the operation.
    builtins = torch.jit._builtins._get_builtin_table()
    builtins[id(shared)] = builtins.get(id(original), f"aten::{loss.name}")
    try:
        with replaced(loss.owner, loss.name, shared):
            yield
    finally:
        del builtins[id(shared)]


class _SharedLoss:
    """A loss of which each rank computes its rows."""

    def __init__(
        self,
        loss: _Loss,
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
        self._reduction: int = args[loss.reduction]
        exchange: RowExchange = path.gather.exchange
        block = exchange.block
        self._rows = RowExchange(exchange.gatherer, block, _PLACE)
        self._ranks = RowExchange(exchange.gatherer, RowBlock(block.rank, block.world_size, block.world_size), _PLACE)

    def compute(self) -> Tensor | None:
        """Return the loss; None, on all ranks, if one of them cannot compute its rows. A collective."""
        scores, targets, *others = self._args
        factor = self._path.factor
        rows = RowsFunction.apply(scores, self._path.gather.block_ends[self._path.index], self._path, self._rows)  # type: ignore[no-untyped-call]
        keeps_bits = self._loss.of_classes and not targets.is_floating_point() and not self._smoothing()
        others[self._loss.reduction - 2] = _NONE if keeps_bits or self._reduction == _NONE else _SUM
        found: Tensor | None = None
        # On a CPU, errors are raised again, with one process's words, when all ranks compute all rows. On a GPU they
        # do not depend on the numbers: wrong labels are told of later.
        with suppress(*_ERRORS) if scores.device.type == "cpu" else nullcontext():
            found = self._original(rows, self._rows.block.of(targets, factor), *others, **self._kwargs)
        if keeps_bits or self._reduction == _NONE:
            losses = self._gather_losses(found, factor)
            return losses if losses is None or self._reduction == _NONE else self._reduce(losses)
        failed = None if scores.device.type != "cpu" else found is None
        if found is None:
            found = scores.new_zeros((), dtype=scores.dtype if scores.dtype in _SUMMED else torch.float32)
        name = "" if found.grad_fn is None else found.grad_fn.name()
        if self._reduction == _MEAN:
            name, found = _MEANS.get(name, name), found / self._divisor()
        total, has_failed = _function(SumFunction, name).apply(found, self._ranks, failed)
        return None if has_failed else total

    def _smoothing(self) -> float:
        smoothing: float = self._args[5] if len(self._args) > 5 else 0.0
        return smoothing

    def _gather_losses(self, found: Tensor | None, factor: int) -> Tensor | None:
        if self._args[0].device.type == "cpu":
            (failed,) = self._ranks.gather([torch.tensor([found is None])], [1])
            if bool(failed.any()):
                return None
        assert found is not None
        return gather_blocks([found], self._rows, [factor])[0]

    def _reduce(self, losses: Tensor) -> Tensor:
        """Return the sum or mean of all targets' losses, with the bits of torch: added as its operation does."""
        targets, weight = self._args[1:3]
        total = self._add(losses)
        if self._reduction == _MEAN:
            counts = targets != self._args[4]
            total = total / (counts.sum() if weight is None else self._add(weight[targets.long().where(counts, 0)]))
        name = "NllLossBackward0" if targets.dim() == 1 else "NllLoss2DBackward0"
        reduced: Tensor = _function(NamedFunction, name).apply(total)
        return reduced

    def _add(self, numbers: Tensor) -> Tensor:
        """Add one number for each target, but those of ignored ones."""
        targets, ignored = self._args[1], self._args[4]
        classes = torch.zeros_like(targets).masked_fill(targets == ignored, -100)
        add: Any = torch._C._nn.nll_loss_nd  # patched, but there is no path from these numbers to an output
        total: Tensor = add(-numbers.unsqueeze(1), classes, None, _SUM, -100)
        return total

    def _divisor(self) -> Any:
        """Return what torch divides the sum of the losses by for their mean."""
        scores, targets, *others = self._args
        if not self._loss.of_classes:
            return scores.numel()
        if targets.is_floating_point():  # probabilities of classes
            return scores.numel() // scores.shape[1]
        weight, ignored = others[0], others[2]
        counts = targets != ignored
        if weight is None:
            return counts.sum()
        return weight[targets.long().where(counts, 0)].where(counts, 0).sum()


class RowsFunction(Function):
    """This rank's rows of ``scores``; their gradient goes straight to the block of the output that they come from.

    If something watches gradients on the way, the gradient is gathered and goes that way instead.
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
            return whole / ctx.exchange.block.world_size, None, None, None
        return None, path.gradient_of_block(gradient), None, None


class SumFunction(Function):
    """The sum of the ranks' numbers, and whether a rank says that it failed; the sum's gradient is times the ranks."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, exchange: RowExchange, failed: bool | None) -> tuple[Tensor, bool]:
        ctx.exchange = exchange
        numbers = [number.reshape(1)] if failed is None else [number.reshape(1), torch.tensor([failed])]
        totals = exchange.gather(numbers, [1] * len(numbers))
        return totals[0].sum(), failed is not None and bool(totals[1].any())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
        return CopyFunction.apply(gradient, ctx.exchange) * ctx.exchange.block.world_size, None, None  # type: ignore[no-untyped-call]


class CopyFunction(Function):
    """A number that is equal on all ranks, as each rank's own."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total, _ = SumFunction.apply(gradient, ctx.exchange, None)  # type: ignore[no-untyped-call]
        return total / ctx.exchange.block.world_size, None


class NamedFunction(Function):
    """A loss as it is, under the name of torch's operation."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@functools.cache
def _function(kind: type[Function], name: str) -> Any:
    """Return ``kind`` whose losses a program sees printed with ``name``, as one process's are."""
    found: Any = type(kind.__name__, (kind,), {})
    found._backward_cls.__name__ = name
    return found


# Note [Losses by rows]
#
# The program has whole outputs, which may be large: scores for a vocabulary. Every rank would compute the loss of all
# rows, and pass gradients of all rows back to the gather, which takes this rank's. Where one of torch's losses gets an
# output of a sliced forward, or views and copies of it that keep the rows of a sample together, a rank computes the
# loss of its rows, from the values that the program passes, and the ranks' losses are added. The gradient goes
# straight to the block. Who watches gradients on the way, by a hook, retain_grad or autograd.grad, gets those of one
# process: they are gathered, and go its way. A hook on a node of the graph itself (tensor.grad_fn.register_hook) is not
# noticed, and saved-tensor hooks see a rank's rows. A loss is an exchange then, which all ranks must come to: once the
# program has asked for its rank, it may compute one on a single rank, so losses are no longer shared out.
#
# The arithmetic is that of Note [Whole]. With R ranks, a rank's own number has R times the gradient of one process,
# and a number that is equal on all ranks has that gradient. So the gradient of the sum s of s_r is R g for each s_r;
# as an operation, it is the copy of g to all ranks, times R, and the gradient of the copy is the sum, divided by R.
