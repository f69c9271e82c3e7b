"""``lagom.gradients.replicas``: where all ranks compute the same gradients, they are not averaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.disk import asked_for_rank
from lagom.errors import DivergenceError
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, lagom_log, run_ranks

STEPS = 70
"""Ranks are compared in steps 16, 32 and 64, among others. In tests they begin to differ in step 18, or at once."""
Step = Callable[[int, Tensor], Tensor]
"""Makes the inputs of a step of those of its batch."""


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of one loader, pass after pass."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 3, generator=generator), torch.randn(48, 1, generator=generator))
    loader = DataLoader(data, batch_size=6, shuffle=True)
    while True:
        yield from loader


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def train(change: Step) -> tuple[list[Tensor], list[float]]:
    """Return the parameters after ``STEPS`` steps of Adam, and the losses."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step, (x, y) in zip(range(STEPS), batches(), strict=False):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(change(step, x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.detach() for p in model.parameters()], losses


def run_small(world_size: int, function: Callable[[Session], Any]) -> list[Any]:
    return run_ranks(world_size, function, batches="whole", always_slices=False)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])  # three show it, and rounding
def test_equal_gradients_are_not_averaged(world_size: int) -> None:
    """A mean of three equal gradients may be rounded."""
    wanted = alone(lambda _: train(lambda step, x: x))
    for found in run_small(world_size, lambda _: train(lambda step, x: x)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.soak  # a test below has many networks in turn
def test_two_networks_that_are_trained_in_turn_have_the_bits_of_one_process() -> None:
    def run(_: Session) -> list[Tensor]:
        one, other = network(), network()
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (one, other)]
        for step, (x, y) in zip(range(STEPS), batches(), strict=False):
            optimizers[step % 2].zero_grad()
            nn.functional.mse_loss(one(x) + other(x).detach() if step % 2 == 0 else other(x), y).backward()
            optimizers[step % 2].step()
        return [p.detach() for p in (*one.parameters(), *other.parameters())]

    wanted = alone(run)
    for found in run_small(2, run):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def noise(step: int, x: Tensor) -> Tensor:
    """Add numbers of a generator with a seed of the system: each rank has its own."""
    return (
        x
        + 0.3
        * torch.from_numpy(
            np.random.default_rng(int.from_bytes(os.urandom(8), "little")).normal(size=tuple(x.shape))
        ).float()
    )


@pytest.mark.soak  # the test below has them later
def test_gradients_that_are_each_ranks_own_from_the_beginning_are_averaged() -> None:
    def run(session: Session) -> tuple[list[Tensor], list[str]]:
        said = lagom_log()
        return train(noise)[0], said

    (first, said), (second, _) = run_small(2, run)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not any("rank 0's parameters" in line for line in said)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])  # as two
@pytest.mark.parametrize("start", [pytest.param(1, marks=pytest.mark.soak), 18])
def test_gradients_that_become_each_ranks_own_later_are_averaged_from_then_on(world_size: int, start: int) -> None:
    """Parameters and what Adam remembers are equal again; else a later check would end the run."""

    def run(_: Session) -> tuple[list[Tensor], list[str]]:
        said = lagom_log()
        return train(lambda step, x: x if step < start else noise(step, x))[0], said

    rows = run_small(world_size, run)
    for parameters, said in rows:
        torch.testing.assert_close(parameters, rows[0][0], rtol=0, atol=0)
        assert sum("rank 0's parameters" in line for line in said) == (start > 1)


def test_a_program_that_has_asked_for_its_rank_has_averages() -> None:
    def run(session: Session) -> list[Tensor]:
        asked_for_rank()
        return train(lambda step, x: x if step < 18 else x + session.rank)[0]

    def together(_: Session) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step, (x, y) in zip(range(STEPS), batches(), strict=False):
            optimizer.zero_grad()
            inputs = (x, x) if step < 18 else (x, x + 1)
            sum(nn.functional.mse_loss(model(one), y) for one in inputs).div(2).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    wanted = alone(together)
    for found in run_small(2, run):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_ranks_may_ask_for_their_rank_in_different_steps() -> None:
    """A program does so where a clock decides when a line with the rank is printed."""

    def run(session: Session) -> Any:
        def ask(step: int, x: Tensor) -> Tensor:
            if step == 18 + 3 * session.rank:
                asked_for_rank()
            return x

        return train(ask)

    wanted = alone(lambda _: train(lambda step, x: x))
    for found in run_small(2, run):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_parameters_that_come_and_go_are_those_of_one_process() -> None:
    """More kinds of backwards than are remembered; new parameters' places in memory are each rank's own."""

    def run(session: Session) -> list[Tensor]:
        base, order = network(), random.Random(1)
        heads: dict[int, nn.Linear] = {}
        kept = []
        for task in range(90):
            heads[task] = nn.Linear(1, 1)
            kept.append([object()] * (task % 7) * session.rank)
            for head in (heads[task], heads[task], nn.Identity()):
                base.zero_grad()
                head.zero_grad()
                head(base(torch.ones(4, 3))).square().mean().backward()
                torch.optim.SGD([*base.parameters(), *head.parameters()], 0.01).step()
            if len(heads) > 6:
                heads.pop(order.choice(sorted(heads)))
        return [p.detach() for p in base.parameters()]

    wanted = alone(run)
    for found in run_small(2, run):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_states_of_optimizers_may_hold_what_is_no_tensor() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            state: Any = self.state
            state["steps"] = state.get("steps", 0) + 1
            return super().step(closure)

    def run(_: Session) -> list[Tensor]:
        model = network()
        optimizer = Counting(model.parameters(), lr=0.01, momentum=0.9)
        for step, (x, y) in zip(range(STEPS), batches(), strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x if step < 18 else noise(step, x)), y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    first, second = run_small(2, run)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_optimizers_by_hand_that_differ_on_ranks_are_an_error() -> None:
    """The state of such an optimizer cannot be made equal."""

    def run(session: Session) -> None:
        model = network()
        remembered = [torch.zeros_like(p) for p in model.parameters()]
        for step, (x, y) in zip(range(STEPS), batches(), strict=False):
            model.zero_grad()
            nn.functional.mse_loss(model(x if step < 18 else noise(step, x)), y).backward()
            for p, mean in zip(model.parameters(), remembered, strict=True):
                assert p.grad is not None
                mean.mul_(0.99).add_(p.grad)
                p.data.sub_(mean, alpha=0.01)

    with pytest.raises(RankFailedError, match="no longer has the same values on all ranks"):
        run_small(2, run)


@pytest.mark.soak  # tests/gradients/test_divergence.py has such ranks
def test_ranks_at_different_places_are_told_at_the_next_comparison() -> None:
    def run(session: Session) -> str:
        model = network()
        try:
            for step, (x, y) in zip(range(STEPS), batches(), strict=False):
                model.zero_grad()
                if session.rank == 0 or step != 18:
                    nn.functional.mse_loss(model(x), y).backward()
        except DivergenceError as error:
            return str(error)
        return ""

    for text in run_small(2, run):
        assert "the ranks are at different points of the program" in text
