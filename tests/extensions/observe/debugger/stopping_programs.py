"""Programs with breakpoints; in a file that a rank imports without pytest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lagom


class Net(nn.Module):
    """Large enough for ranks to share its rows."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 1)
        self.stops = stops

    def forward(self, x: torch.Tensor) -> Any:
        y = nn.functional.dropout(torch.relu(self.first(x)), 0.2, self.training)
        if self.stops:
            breakpoint()
        return self.second(y)


def train(place: str) -> list[float]:
    x = torch.rand(512, 256)
    loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=128, shuffle=True)
    model = Net(stops=place == "forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        if place == "loop":
            breakpoint()
        loss.backward()
        optimizer.step()
    return [p.double().sum().item() for p in model.parameters()]


def where() -> int:
    breakpoint()
    return lagom.rank()


def fails(ranks: tuple[int, ...], stops: bool = False) -> int:
    secret = 40 + lagom.rank()
    if stops:
        breakpoint()
    if lagom.rank() in ranks:
        raise KeyError(secret)
    total = torch.ones(2, requires_grad=True)
    total.sum().backward()  # where the other ranks wait
    return 0


class Stopping(Dataset[torch.Tensor]):
    """Each of its samples is a breakpoint."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        breakpoint()
        return torch.ones(2)
