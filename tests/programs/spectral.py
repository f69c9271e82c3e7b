"""Spectral and weight norm: parametrisations, with buffers that each training forward advances."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(39, 4)
    y = x.prod(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 10))
    second = nn.utils.parametrizations.weight_norm(nn.Linear(10, 1))
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        final = F.mse_loss(model(x), y).item()
    print(f"final {final:.10f}")
    return {"weights": model.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
