"""``share_losses``: each rank computes the loss of its rows of a large output, and the ranks' losses are added."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.jit._builtins
from torch import Tensor, nn
from torch.autograd import forward_ad

from lagom.forward.rows import whole_batch
from lagom.forward.rows.inner_losses import current_losses
from lagom.forward.rows.path_to_output import find_gradient_path, watch_gradient
from lagom.forward.rows.row_functions import MIN_LOSS_BYTES
from lagom.forward.rows.shared_loss import SharedLoss, TorchLoss
from lagom.patching.replace import replaced
from lagom.watch.step_clock import FORWARD_DIVIDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lagom.forward.rows.path_to_output import GradientPath
    from lagom.session.session import Session


@contextmanager
def share_losses(session: Session, knows_rank: Callable[[], bool]) -> Iterator[None]:
    """Patch torch's losses, and the functions that watch gradients. See Note [Losses by rows].

    Args:
        knows_rank: tells whether the program has asked for its rank, and so may compute a loss on one rank alone.
    """
    sharing = _Sharing(session, knows_rank)
    session.resumption.learned["losses"] = sharing.state, sharing.restore
    with ExitStack() as stack:
        for loss in _LOSSES:
            stack.enter_context(_share_loss(sharing, loss))
        for name in ("register_hook", "retain_grad"):
            stack.enter_context(_called_before(Tensor, name, lambda tensor, *_: watch_gradient(tensor.grad_fn)))
        # These functions put hooks on nodes of the graph, which are not seen; so losses are no longer shared out.
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


_LOSSES = (
    TorchLoss(torch._C._nn, "cross_entropy_loss", 3, (2,), of_classes=True),
    TorchLoss(torch._C._nn, "nll_loss_nd", 3, (2,), of_classes=True),
    *(TorchLoss(torch._C._nn, name, 2) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    TorchLoss(torch._C._nn, "binary_cross_entropy", 3, (2,)),
    TorchLoss(torch, "binary_cross_entropy_with_logits", 4, (2, 3)),
    TorchLoss(torch, "kl_div", 2),
)


class _Sharing:
    """Decides which losses ranks share out."""

    def __init__(self, session: Session, knows_rank: Callable[[], bool]) -> None:
        self.session = session
        self._knows_rank = knows_rank
        self._is_over = False

    def end(self, *_: Any) -> None:
        """Share out no loss any more."""
        self._is_over = True

    def state(self) -> list[tuple[None, bool]]:
        """Return whether no loss is shared out any more, for ``restore`` in another process."""
        return [(None, self._is_over)]

    def restore(self, state: Sequence[tuple[None, bool]]) -> None:
        """Go on as the process that returned ``state``."""
        ((_, self._is_over),) = state

    def find_path(self, loss: TorchLoss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradientPath | None:
        """Return the path from an output to the scores; None unless each rank can compute the loss of its rows."""
        if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling() or len(args) <= loss.reduction:
            return None
        scores, targets = args[:2]
        if not (isinstance(scores, Tensor) and isinstance(targets, Tensor) and scores.requires_grad and scores.dim()):
            return None
        if not whole_batch.ALWAYS and scores.numel() * scores.element_size() < MIN_LOSS_BYTES:
            return None
        if not loss.has_rows(args) or any(isinstance(one, Tensor) for one in kwargs.values()):
            return None
        return find_gradient_path(scores) if self._may_share() else None

    def _may_share(self) -> bool:
        session = self.session
        if (
            self._is_over
            or not session.may_meet
            or session.forwards.is_probing
            or session.forwards.sliced_forward is not None
        ):
            return False
        if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled or self._knows_rank():
            return False
        # Not under transforms, forward-mode derivatives, tracers, or modes that see each operation.
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        return not (is_transformed or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0)


@contextmanager
def _share_loss(sharing: _Sharing, loss: TorchLoss) -> Iterator[None]:
    original = getattr(loss.owner, loss.name)

    def shared(*args: Any, **kwargs: Any) -> Any:
        if (inner := current_losses()) is not None:
            return inner.compute(loss, original, args, kwargs)
        path = sharing.find_path(loss, args, kwargs)
        if path is not None:
            with sharing.session.clock.during(FORWARD_DIVIDED):
                found = SharedLoss(loss, original, args, kwargs, path).compute()
            if found is not None:
                return found
        return original(*args, **kwargs)

    # Pickle finds the function by these names.
    shared.__module__, shared.__qualname__, shared.__name__ = loss.owner.__name__, loss.name, loss.name
    # torch.jit.script compiles torch's Python code, and must take this function for the operation.
    builtins = torch.jit._builtins._get_builtin_table()
    builtins[id(shared)] = builtins.get(id(original), f"aten::{loss.name}")
    try:
        with replaced(loss.owner, loss.name, shared):
            yield
    finally:
        del builtins[id(shared)]


# Note [Losses by rows]
#
# The program has whole outputs, which may be large: scores for a vocabulary. Without this file, every rank would
# compute the loss of all rows, and pass gradients of all rows back to the gather, which keeps this rank's rows.
# Instead, if one of torch's losses gets an output of a sliced forward, or a view or copy of it that keeps the rows of a
# sample together, a rank computes the loss of its rows, from the values that the program passes, and the ranks' losses
# are added. The gradient goes straight to the block.
#
# The program may watch gradients between the loss and the output, by a hook, retain_grad or autograd.grad. It must see
# the gradients of one process, so they are then gathered and go back through the graph. A hook on a node of the graph
# itself (tensor.grad_fn.register_hook) is not noticed, and saved-tensor hooks see a rank's rows.
#
# A loss that is shared out is a collective. Once the program has asked for its rank, it may compute a loss on a single
# rank, so losses are no longer shared out.
#
# The arithmetic is that of Note [Whole] in row_functions.py. With R ranks, a rank's own number has R times the gradient
# of one process, and a number that is equal on all ranks has the gradient of one process. Let s be the sum of the
# ranks' numbers s_r, with the gradient g. Then each s_r has the gradient R g: g is copied to all ranks and multiplied
# by R. The gradient of such a copy is the sum of the ranks' gradients, divided by R.
