"""Backward: the root is weighted by this rank's part of the batch, and gradients are averaged when it ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd

from lagom.patching.replace import replaced
from lagom.strategies.differentiated import averaged, passes_gather
from lagom.strategies.leaves import reached

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from lagom.patching.session import Session


@contextmanager
def synchronised_backward(session: Session) -> Iterator[None]:
    """Have ``Tensor.backward`` and ``torch.autograd.backward`` average gradients over the ranks.

    Both end in one function of torch's, with their arguments put in order; patching that one reaches them
    however they were imported, and tells ``torch.autograd.grad`` apart.
    """
    original = torch.autograd._engine_run_backward
    pending: list[Tensor] = []

    def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if not session.live:
            return original(outputs, *args, **options)
        accumulates = options.get("accumulate_grad", False)
        outermost = session.depth == 0
        if accumulates:
            # Now: the graph is freed by the backward. Re-entrant checkpoints run backwards of their own inside.
            pending.extend(leaf for leaf in reached(outputs, args[3]) if leaf not in session.repeated)
            if outermost:
                args = (_weighted(args[0], session.weight), *args[1:])
        elif outermost:
            assert session.watch is not None
            session.watch.differentiated([leaf for leaf in args[3] if isinstance(leaf, torch.nn.Parameter)])
        averages = outermost and not accumulates and session.region is None and passes_gather(outputs)
        session.depth += 1
        try:
            result = original(outputs, *args, **options)
            leaves = list({id(leaf): leaf for leaf in pending}.values()) if outermost else []
        finally:
            session.depth -= 1
            if outermost:
                pending.clear()
        if leaves:
            session.began = session.began or "a backward ran"
            assert session.replicate is not None
            session.replicate.reduce(leaves)
            session.trained()
        if averages:
            assert session.group is not None
            session.at("torch.autograd.grad")
            return averaged(result, session.group)
        return result

    with replaced(torch.autograd, "_engine_run_backward", run_backward):
        yield


def _weighted(gradients: Sequence[Tensor | None], weight: float) -> Sequence[Tensor | None]:
    if weight == 1.0:
        return gradients
    return tuple(None if gradient is None else gradient * weight for gradient in gradients)
