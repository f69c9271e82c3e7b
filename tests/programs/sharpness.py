"""Sharpness-aware minimisation: climb along the gradient, take the gradient there, come back, step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, reach: float = 0.05) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(38, 3)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            steps = [(p, p.grad * reach / norm) for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                for parameter, step in steps:
                    parameter.add_(step)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for parameter, step in steps:
                    parameter.sub_(step)
            optimizer.step()
        print(f"epoch {epoch}: norm {norm.item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
