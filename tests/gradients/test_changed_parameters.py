"""Forwards that change parameters: momentum encoders, initialisation by the first batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom.session.session import Session
from tests.ranks import RankFailedError, check_against_one_process, run_ranks


class MomentumEncoder(nn.Module):
    """Its second encoder follows the first in each forward, as MoCo has it."""

    def __init__(self, assigned: bool) -> None:
        super().__init__()
        self.query = nn.Linear(5, 4)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.assigned = assigned

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.assigned:
                    ours.data = ours.data * 0.9 + theirs.data * 0.1
                else:
                    ours.data.lerp_(theirs.data, 0.1)
        apart: Tensor = self.query(x) - 0.5 * self.key(x)
        return apart.square().sum(1)


class Whitened(nn.Module):
    """Takes its shift and scale from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(5))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
                self.ready.fill_(True)  # type: ignore[operator]  # a buffer
        return (x + self.shift) * self.scale


def trained(model: nn.Module) -> list[Any]:
    """Losses of all steps, and weights in the end."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(37, 5, generator=generator, dtype=torch.float64)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(2):
        for rows, _ in DataLoader(TensorDataset(x, x), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = F.softplus(model(rows)).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [losses, *[tensor.detach().clone().double() for tensor in model.state_dict().values()]]


@pytest.mark.parametrize("zero_lvl", [0, 3])
def test_whole_batches_train_as_one_process_does(zero_lvl: int) -> None:
    def program(_: Session) -> Any:
        models = (
            MomentumEncoder(assigned=True),
            MomentumEncoder(assigned=False),
            nn.Sequential(Whitened(), nn.Linear(5, 1), nn.Flatten(0)),
        )
        return [part for model in models for part in trained(model.double())]

    check_against_one_process(program, batches="whole", zero_lvl=zero_lvl)


def test_a_look_that_has_changed_parameters_is_an_error() -> None:
    """Micro-batches look at the first forward before it runs, and parameters are not kept twice."""
    with pytest.raises(RankFailedError, match=r"the forward of MomentumEncoder changes parameters\. .*micro_batches"):
        run_ranks(1, lambda _: trained(MomentumEncoder(assigned=True).double()), micro_batches=2)
