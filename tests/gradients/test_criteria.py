"""``lagom.run_state.loss_terms``: what is said of losses that shares of a batch make other numbers of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom.run_state.loss_terms import SUMMED, WEIGHTED, find_caveats
from lagom.session.session import Session
from tests.ranks import alone, run_ranks

PADDED, FULL = torch.tensor([0, 1, 2, -100]), torch.tensor([0, 1, 2, 1])
model = nn.Linear(3, 3)

LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[str]]] = {
    "mean": (lambda x, _: F.cross_entropy(x, FULL), []),
    "mean of a sum": (lambda x, _: F.mse_loss(x, x.detach() + 1, reduction="sum") / len(x), []),
    "weight decay": (lambda x, w: F.cross_entropy(x, FULL) + w.square().sum(), []),
    "probabilities": (lambda x, _: F.cross_entropy(x, x.detach().softmax(1), weight=torch.rand(3)), []),
    "none, then a mean": (lambda x, _: F.cross_entropy(x, PADDED, reduction="none").mean(), []),
    "padding": (lambda x, _: F.cross_entropy(x, PADDED), [WEIGHTED]),
    "mean of the tokens": (lambda x, _: F.cross_entropy(x, PADDED, reduction="sum") / 3, [WEIGHTED]),
    "pixels": (lambda x, _: F.cross_entropy(x.T[None, :, :, None], PADDED[None, :, None]), [WEIGHTED]),
    "classes": (lambda x, w: F.nll_loss(F.log_softmax(x, 1), FULL, weight=w[0].detach().exp()), [WEIGHTED]),
    "sum": (lambda x, _: (x - 1).square().sum(), [SUMMED]),
    "sum of a criterion": (lambda x, _: F.huber_loss(x, x.detach() + 1, reduction="sum"), [SUMMED]),
    "sum and a term": (lambda x, w: F.l1_loss(x, x.detach() + 1, reduction="sum") + 0.1 * w.square().sum(), [SUMMED]),
}


def test_losses_that_are_no_mean_over_the_samples_are_told_of_and_others_are_not() -> None:
    def program(_: Session) -> dict[str, list[str]]:
        found = {}
        for name, (criterion, _wanted) in LOSSES.items():
            for (x,) in DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=8):
                loss = criterion(model(x), model.weight)
                found[name] = find_caveats([loss])
                loss.backward()
        return found

    node: Any = torch.ones(1, requires_grad=True).exp().grad_fn
    tells_hooks = hasattr(node._raw_saved_result, "unpack_hook")  # older torch does not: nothing is said of weights
    for found in run_ranks(2, program):
        assert found == {
            name: [one for one in wanted if tells_hooks or one != WEIGHTED] for name, (_, wanted) in LOSSES.items()
        }


def test_a_loss_whose_graph_is_freed_or_checkpointed_is_not_read() -> None:
    calls = []

    def criterion(x: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(model(x), PADDED)

    def program(_: Session) -> list[Any]:
        calls.clear()
        x, w = torch.ones(4, 3), torch.ones(3, requires_grad=True)
        loss = criterion(x)
        loss.backward()
        (gradient,) = torch.autograd.grad(loss + w.square().sum(), [w])
        loss = checkpoint(criterion, x, use_reentrant=False)
        told, before = find_caveats([loss]), len(calls)
        loss.backward()
        return [gradient.tolist(), told, before, len(calls)]

    assert alone(program) == [[2.0] * 3, [], 2, 3]
    assert run_ranks(2, program, batches="split") == [[[2.0] * 3, [], 2, 3]] * 2
