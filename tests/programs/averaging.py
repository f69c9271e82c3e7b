"""An exponential moving average of the weights, kept by hand and by torch's AveragedModel, judges the training."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def update(average: nn.Module, model: nn.Module, decay: float) -> None:
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.mul_(decay).add_(new, alpha=1 - decay)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(43, 4)
    y = x.prod(1, keepdim=True).tanh()
    loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 1))
    average = copy.deepcopy(model).requires_grad_(False)
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            update(average, model, 0.9)
        mean.update_parameters(model)
        with torch.no_grad():
            losses = [F.mse_loss(judged(x), y).item() for judged in (model, average, mean)]
        print(f"epoch {epoch}: " + ", ".join(f"{loss:.10f}" for loss in losses))
    return {"model": model.state_dict(), "average": average.state_dict(), "mean": mean.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
