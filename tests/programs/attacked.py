"""Adversarial training: the gradient of the loss by the inputs makes the samples that are trained on."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, reach: float = 0.1, sign: bool = True) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(41, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for epoch in range(epochs):
        for inputs, targets in loader:
            inputs.requires_grad_(True)
            F.cross_entropy(model(inputs), targets).backward()
            assert inputs.grad is not None
            step = inputs.grad.sign() if sign else 10 * inputs.grad
            attacked = (inputs + reach * step).detach()
            optimizer.zero_grad()
            F.cross_entropy(model(attacked), targets).backward()
            optimizer.step()
        with torch.no_grad():
            print(f"epoch {epoch}: clean {F.cross_entropy(model(x), y).item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
