"""``record_pass_losses``: the mean training loss of each pass over a loader, for programs that log nothing."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagom.patching.object_reference import HiddenReference
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lagom.session.session import Session


@contextmanager
def record_pass_losses(session: Session, report: Callable[[float], None]) -> Iterator[None]:
    """Call ``report`` with the mean loss of each training pass but the last, at the first backward of the next pass.

    See Note [Pass losses].
    """
    losses = _PassLosses(session, report)
    original, scale = torch.autograd._engine_run_backward, vars(torch.amp.GradScaler)["scale"]

    @functools.wraps(original)
    def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if options.get("accumulate_grad", False):
            losses.record(outputs)
        return original(outputs, *args, **options)

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        found = scale(self, outputs)
        if isinstance(outputs, Tensor):
            losses.unscaled = HiddenReference(found), outputs.detach()
        else:
            losses.are_one = False
        return found

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", run_backward))
        stack.enter_context(replaced(torch.amp.GradScaler, "scale", scaled))
        yield


class _PassLosses:
    """Adds up the losses of a pass."""

    def __init__(self, session: Session, report: Callable[[float], None]) -> None:
        self._session = session
        self._report = report
        self.are_one = session.world_size == 1 or session.config.batches == "whole"
        """Whether each batch has had one loss so far, equal on all ranks."""
        self.unscaled: tuple[HiddenReference[Tensor], Tensor] | None = None
        """The tensor that a GradScaler has returned last, and the unscaled loss of which it is made."""
        self._at: tuple[int, int] = (0, 0)
        self._total: float | Tensor = 0.0
        self._num = 0

    def record(self, roots: Sequence[Any]) -> None:
        """Add the loss of a backward from ``roots``; stop recording if a batch has several losses, or no scalar one."""
        session, passes = self._session, self._session.passes
        if (
            not self.are_one
            or session.backwards.depth
            or session.forwards.is_probing
            or not session.live
            or session.has_joined
        ):
            return
        at = passes.progress["epoch"] or 0, passes.progress["step"] or 0
        if at[0] != self._at[0]:
            self._end_pass()
        if not passes.trains():
            return
        if at == self._at or len(roots) != 1 or not isinstance(roots[0], Tensor) or roots[0].numel() != 1:
            self.are_one = False
            return
        self._at = at
        loss = roots[0].detach()
        if self.unscaled is not None and self.unscaled[0]() is roots[0]:
            loss = self.unscaled[1]
        # On an accelerator the sum stays a tensor, so that the program does not wait for the device.
        self._total = self._total + (float(loss) if loss.is_cpu else loss.double())
        self._num += 1

    def _end_pass(self) -> None:
        total, num = self._total, self._num
        self._total, self._num = 0.0, 0
        if num:
            self._report(float(total) / num)


# Note [Pass losses]
#
# The loss of a pass is the mean, over its batches, of the tensor on which the program calls `backward`. Most programs
# print the same number. The loss is reported at the first backward of the next pass: by then a program that logs the
# metric itself has done so, and its values count. The loss of the last pass is not reported: nothing is left to prune.
#
# No loss is reported where the mean would not be "the loss": with several backwards for a batch (adversarial networks,
# LBFGS), with a backward from anything but one number, without a loader, with batches that are split between ranks
# (each rank has the loss of its share), and under DeepSpeed. If a GradScaler has scaled a loss, the unscaled loss
# counts.
