"""``lagom.gradients.cached_backward``: backwards like those before take the short way, and all others the long one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lagom.gradients.gradient_averager import GradientAverager
from lagom.patching.replace import replaced
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks
from tests.session.programs import data, mlp

STEADY = 4
"""Batches after which a program does something new."""
RANK = [0]
"""Rank of this process, for what differs on one rank."""
Change = Callable[[Any, int, Tensor, Tensor], Tensor]


def trained(change: Change, model: nn.Sequential | None = None, skips: int = -1, rate: float = 0.1) -> list[Tensor]:
    """SGD with a loss of one kind in the first batches, then with what ``change`` makes of it, and again the first."""
    torch.manual_seed(0)
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for i, (x, y) in enumerate(DataLoader(data(58), batch_size=6)):
        optimizer.zero_grad()
        changed = STEADY <= i < STEADY + 2
        loss = change(model, i, x, y) if changed else nn.functional.mse_loss(model(x), y)
        if i != skips:
            loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def plain(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def other_leaves(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model[2](torch.ones(len(x), 8).double()), y)


def hooks(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    if i == STEADY:
        model[0].weight.register_hook(torch.sign)
    return plain(model, i, x, y)


def hooks_afterwards(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    def clamp(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.clamp_(-0.01, 0.01)

    if i == STEADY:
        model[0].weight.register_post_accumulate_grad_hook(clamp)
    return plain(model, i, x, y)


def gradients_before(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    model[0].weight.grad = torch.ones_like(model[0].weight)
    return plain(model, i, x, y)


def a_second_backward(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    plain(model, i, x + 1, y).backward()
    return plain(model, i, x, y)


def a_graph_that_is_kept(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a cycle, which ends below
        plain(model, i, x, y).backward(create_graph=True)
    norm = sum((p.grad.square().sum() for p in model.parameters() if p.grad is not None), torch.zeros(1).double())
    for p in model.parameters():
        p.grad = None
    return norm.sum() + plain(model, i, x, y)


def a_checkpoint(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    """A checkpoint that runs a backward inside the outer one, and reaches the layer between."""
    inner: Any = checkpoint(lambda h: h.tanh() * model[0].bias.sum(), model[0](x), use_reentrant=True)
    return nn.functional.mse_loss(model[2](inner), y)


def another_shape(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    model[2].weight.data = model[2].weight.data.repeat(2, 1)
    model[2].bias.data = model[2].bias.data.repeat(2)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    model[2].weight.data, model[2].bias.data = model[2].weight.data[:1], model[2].bias.data[:1]
    return plain(model, i, x, y)


class Negative(torch.autograd.Function):
    """A gradient whose memory has the negative of its numbers."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad if RANK[0] else torch._neg_view(-grad), grad


def a_negative(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    weight = model[0].weight
    both: Tensor = Negative.apply(weight, torch.zeros_like(weight))  # type: ignore[no-untyped-call]
    hidden = (x @ both.t() + model[0].bias).tanh()
    return nn.functional.mse_loss(model[2](hidden), y)


class Shared(torch.autograd.Function):
    """Gives both arguments gradients in the same memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        both = grad.clone()
        return both.view_as(both), both.view_as(both)


def shared_memory(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    mixed: Tensor = Shared.apply(model[0].bias, model[2].weight.view(8))  # type: ignore[no-untyped-call]
    return nn.functional.mse_loss(x.sum(1, keepdim=True) * mixed, y.expand(-1, 8))


def strided(model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
    if not RANK[0]:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return plain(model, i, x, y)


CHANGES = [plain, other_leaves, hooks, hooks_afterwards, gradients_before, a_second_backward, a_graph_that_is_kept]
CHANGES += [a_checkpoint, another_shape, a_negative, shared_memory, strided]


def test_what_is_new_is_as_on_one_machine() -> None:
    def run(session: Session) -> dict[str, list[Tensor]]:
        RANK[0] = session.rank
        return {change.__name__: trained(change) for change in CHANGES}

    expected = alone(run)
    for found in run_ranks(2, run):
        for name, values in expected.items():
            assert all(torch.allclose(*both, rtol=0, atol=1e-12) for both in zip(found[name], values, strict=True)), (
                name
            )


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])  # as on two
def test_most_backwards_take_the_short_way(world_size: int) -> None:
    """Also with large gradients, in buckets, and with a tail of which some ranks have more than others."""
    for width in (8, 40_000):

        def run(_: Session, width: int = width) -> tuple[list[Tensor], int]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
            long = []
            original = GradientAverager.average_backward

            def counted(self: GradientAverager, pending: Any, **options: bool) -> None:
                long.append(pending)
                original(self, pending, **options)

            with replaced(GradientAverager, "average_backward", counted):
                return trained(plain, model, rate=1e-5), len(long)

        expected, _ = alone(run)
        for found, num_long in run_ranks(world_size, run):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            assert num_long == 1


def test_ranks_that_reach_other_parameters_average_all_of_them() -> None:
    def run(session: Session, which: tuple[int, int]) -> list[Tensor]:
        torch.manual_seed(0)
        experts = nn.ModuleList(nn.Linear(2, 1).double() for _ in range(2))
        optimizer = torch.optim.SGD(experts.parameters(), 0.1)
        x = torch.randn(4, 2).double()
        for i in range(6):
            optimizer.zero_grad()
            chosen = which if i == 4 else (0, 0)
            if session.world_size == 1:
                loss = sum(experts[k](x).square().mean() for k in chosen) / 2
            else:
                loss = experts[chosen[session.rank]](x).square().mean()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in experts.parameters()]

    expected = alone(lambda session: run(session, (0, 1)))
    for found in run_ranks(2, lambda session: run(session, (0, 1))):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_rank_that_is_on_another_batch_is_told() -> None:
    with pytest.raises(
        RankFailedError, match=r"DivergenceError.* at a backward on batch 7 of a pass, rank 1 at .* batch 6 of"
    ):
        run_ranks(2, lambda session: trained(plain, skips=5 + session.rank))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.soak), True])
def test_one_that_fails_leaves_no_gradients_and_hooks_in_place(nested: bool) -> None:
    def change(session: Session, model: Any, i: int, x: Tensor, y: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hidden, inner = model[0](x), nn.Linear(8, 8).double()
        inner.weight.register_hook(seen.append)
        broken = Fails.apply(hidden)  # type: ignore[no-untyped-call]
        # What is inside has a hook, which is kept back meanwhile.
        hidden = checkpoint(inner, broken, use_reentrant=True) if nested else broken
        with pytest.raises(torch.OutOfMemoryError):
            nn.functional.mse_loss(model[2](hidden.tanh()), y).backward()
        if session.world_size > 1:
            assert [p.grad for p in (*model.parameters(), *inner.parameters())] == [None] * 6
        for p in (*model.parameters(), *inner.parameters()):
            p.grad = None
        seen.clear()
        inner(hidden.detach()).sum().backward()
        assert len(seen) == 1
        return plain(model, i, x, y)

    def run(session: Session) -> list[Tensor]:
        return trained(partial(change, session))

    check_against_one_process(run)
