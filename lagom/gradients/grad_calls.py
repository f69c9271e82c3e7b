"""``GradCalls``: calls of ``torch.autograd.grad``, whose gradients are averaged over the ranks where this is right."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagom.forward.rows.row_functions import is_batched, passes_gather
from lagom.gradients.autograd_grad import is_averaged
from lagom.gradients.backward_gradients import DelayedHooks
from lagom.gradients.batched_roots import take_one_by_one
from lagom.run_state.exchange_function import find_exchanges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lagom.gradients.autograd_grad import AutogradGradAverager
    from lagom.session.session import Session


class GradCalls:
    """Runs the program's calls of ``torch.autograd.grad``, and averages gradients of inputs that ranks have in common.

    Args:
        original: torch's own ``torch.autograd._engine_run_backward``.
        averager: averages the gradients.
    """

    def __init__(self, session: Session, original: Callable[..., Any], averager: AutogradGradAverager) -> None:
        assert session.backwards.divergence is not None
        self._session = session
        self._original = original
        self._divergence = session.backwards.divergence
        self._grads = averager

    def run(self, outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``torch.autograd.grad``; average gradients (see ``_find_averaged_inputs``) unless inside a backward."""
        inputs: Sequence[Any] = args[3]
        if self._takes_several(outputs, args) and (exchanges := find_exchanges(outputs)):
            run = self.run if any(one.gives_whole for one in exchanges) else self._run_alone
            if run != self.run:
                self._find_averaged_inputs(outputs, inputs, args[0])  # records the inputs

            def take(roots: tuple[Tensor, ...], is_last: bool) -> Any:
                return run(outputs, (roots, args[1] if is_last else True, *args[2:]), options)

            return take_one_by_one(args[0], take)
        shared = [] if self._session.backwards.depth else self._find_averaged_inputs(outputs, inputs, args[0])
        if not shared:
            return self._run_alone(outputs, args, options)
        self._session.distributed_part = self._session.distributed_part or "torch.autograd.grad was called"
        weights = self._find_weights(outputs, inputs)
        roots, term_hooks = self._session.backwards.loss_weights.weight_gradients(
            outputs, args[0], self._session.weight
        )
        hooks = DelayedHooks()
        try:
            for i in shared:
                hooks.delay(inputs[i])
            with inside_backward(self._session):
                found = list(self._original(outputs, roots, *args[1:], **options))
        finally:
            hooks.restore()
            for hook in term_hooks:
                hook.remove()
        found = [g if g is None or i in shared or weights[i] in (0, 1) else g / weights[i] for i, g in enumerate(found)]
        averages = self._grads.average_returned(
            [inputs[i] for i in shared], [found[i] for i in shared], [weights[i] for i in shared]
        )
        hooked: dict[int, Tensor | None] = {}  # by id, since hooks of an input that is given twice are called once
        for i, average in zip(shared, averages, strict=True):
            if id(inputs[i]) not in hooked:
                hooked[id(inputs[i])] = None if average is None else hooks.run(inputs[i], average)
            found[i] = hooked[id(inputs[i])]
        return tuple(found)

    def _find_weights(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[float]:
        """Return, for each of ``inputs``, the weight by which its gradient is multiplied; a guess for a shared input.

        If terms of the loss have different weights, an input that is not shared gets that of its own batch; 1 if that
        is unknown, as a term without a known batch has.
        """
        session = self._session
        common = session.backwards.loss_weights.common_weight(outputs, session.weight)
        if common is not None:
            return [common] * len(inputs)
        shares = [session.tensors.batch_tracker.share(one) for one in inputs]
        return [1.0 if share is None else share.weight(session.world_size) for share in shares]

    def _run_alone(self, outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``torch.autograd.grad``; its gradients stay this rank's own."""
        with inside_backward(self._session):
            return self._original(outputs, *args, **options)

    def _takes_several(self, outputs: Sequence[Any], args: tuple[Any, ...]) -> bool:
        """Return whether the call asks for several gradients of a tensor at once."""
        if (
            self._session.backwards.depth
            or self._session.forwards.sliced_forward is not None
            or self._session.forwards.is_probing
        ):
            return False
        if not any(isinstance(root, Tensor) and is_batched(root) and root.numel() for root in args[0]):
            return False
        return not any(isinstance(one, Tensor) and is_batched(one) for one in outputs)

    def _find_averaged_inputs(self, outputs: Sequence[Any], inputs: Sequence[Any], roots: Sequence[Any]) -> list[int]:
        """Return the indices of the ``inputs`` whose gradients are averaged; record facts about the other inputs."""
        if self._session.forwards.sliced_forward is not None or self._session.forwards.is_probing:
            # In a forward that computes a block of rows, an input that a later backward reaches is this rank's own.
            own = [one for one in inputs if isinstance(one, Tensor) and one.is_leaf]
            self._session.tensors.repeated_inputs.update(
                dict.fromkeys(o for o in own if not isinstance(o, torch.nn.Parameter))
            )
            return []
        if any(is_batched(one) for one in (*inputs, *roots) if isinstance(one, Tensor)):
            # Batched calls (torch.func, is_grads_batched) usually compute gradients per sample, which are not averaged.
            plain = [_unwrap(one) for one in inputs if isinstance(one, Tensor)]
            self._divergence.add_differentiated([one for one in plain if isinstance(one, torch.nn.Parameter)])
            return []
        if passes_gather(outputs):  # then averages give the whole batch's gradients for all inputs
            return [i for i, one in enumerate(inputs) if isinstance(one, Tensor)]
        session = self._session
        session.begin_backward(outputs, [one for one in inputs if isinstance(one, Tensor) and one.is_leaf])
        shared_out = session.passes.share is not None or session.config.batches == "whole"
        return [
            i
            for i, one in enumerate(inputs)
            if isinstance(one, Tensor) and is_averaged(one, session.likeness(one), shared_out=shared_out)
        ]


@contextmanager
def inside_backward(session: Session) -> Iterator[None]:
    """Context manager in which ``session.backwards.depth`` counts one more running backward."""
    session.backwards.depth += 1
    try:
        yield
    finally:
        session.backwards.depth -= 1


def _unwrap(one: Tensor) -> Tensor:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(one):
        one = functorch.get_unwrapped(one)
    return one
