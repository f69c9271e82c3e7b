"""``zero_lvl=3``: what gets at parameters past torch's operations, or in another thread, or fails on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lagom.errors import DivergenceError
from lagom.session.session import Session
from tests.ranks import RankFailedError, alone, check_against_one_process, run_ranks


def trained() -> Any:
    """A model of which each rank has parts, none of it whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96)).double()
    step(model)
    return model


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.ones(4, 96, dtype=torch.float64)).pow(2).sum().backward()
    optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def methods(session: Session) -> list[torch.Tensor]:
    """Ways to write that torch's dispatcher does not see."""
    model = trained()
    first, last = model[0].weight, model[2].weight
    first.data.apply_(lambda value: 2 * value)
    step(model)
    last.data.map_(first.data, lambda value, other: value - other)
    step(model)
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(first.detach())).mul_(3)
    step(model)
    values = last.detach().numpy()
    step(model)
    values[:] = values[::-1].copy()  # the same numbers at other places
    step(model)
    return whole(model)


def failing(session: Session) -> list[torch.Tensor]:
    """Fail to overwrite parameters, which stay as they were, and go on, as a program does that loads in part."""
    model = trained()
    with pytest.raises(RuntimeError, match=r"must match|size"):
        model[0].weight.data.copy_(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="std"):
        model[2].weight.data.normal_(std=-1.0)
    step(model)
    return whole(model)


@pytest.mark.parametrize("program", [methods, failing])
def test_numbers_are_those_of_one_process(program: Any) -> None:
    check_against_one_process(program, rtol=1e-12, atol=1e-12, zero_lvl=3)


def two_losses(session: Session) -> list[torch.Tensor]:
    """Both made before the first step, which leaves alone what has no gradient."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 300)).double() for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
    for _ in range(3):
        losses = [model(torch.ones(4, 96, dtype=torch.float64)).pow(2).mean() for model in models]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [value for model in models for value in whole(model)]


def changed_before_backward(session: Session) -> None:
    """To step between a loss and its backward is torch's error, at each level."""
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (model(torch.ones(4, 96, dtype=torch.float64)).pow(2).mean() for _ in range(2))
    first.backward()
    optimizer.step()
    second.backward()


@pytest.mark.parametrize("zero_lvl", [*(pytest.param(level, marks=pytest.mark.soak) for level in (1, 2)), 3])
def test_what_a_step_leaves_alone_counts_as_unchanged(zero_lvl: int) -> None:
    wanted = alone(two_losses)
    for found in run_ranks(2, two_losses, zero_lvl=zero_lvl):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(RankFailedError, match="modified by an inplace operation"):
        run_ranks(2, changed_before_backward, zero_lvl=zero_lvl)


@pytest.mark.parametrize("when", ["made", "trained"])
def test_the_same_numbers_at_other_places_are_other_values(when: str) -> None:
    def program(session: Session) -> None:
        model: Any = trained() if when == "trained" else nn.Sequential(nn.Linear(96, 96)).double()
        if session.rank == 1:
            with torch.no_grad():
                order = np.random.default_rng(1).permutation(96)
                model[0].weight.copy_(model[0].weight[torch.from_numpy(order)])
        step(model)

    with pytest.raises(RankFailedError, match=DivergenceError.__name__):
        run_ranks(2, program, zero_lvl=3)
