"""A model in nn.DataParallel, which on a CPU hands on, and loaders whose arguments scripts pass around."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(38, 3)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "pin_memory": False, "num_workers": 0}
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), **options)
    model = nn.DataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    torch.save(model.module.state_dict(), "module.pt")
    with torch.no_grad():
        print(f"final {F.mse_loss(model(x), x.prod(1, keepdim=True)).item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
