"""Trains with an evaluation in each epoch; then a hook, registered late, collects features of the test set."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(50, 3)
    y = x.prod(1, keepdim=True)
    train_loader = DataLoader(TensorDataset(x[:30], y[:30]), batch_size=6, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[30:], y[30:]), batch_size=8)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total = sum(F.mse_loss(model(inputs), targets).item() for inputs, targets in test_loader)
        print(f"epoch {epoch}: {total / len(test_loader):.10f}")
    features: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda module, inputs, output: features.append(output))
    with torch.no_grad():
        for inputs, _ in test_loader:
            model(inputs)
    handle.remove()
    together = torch.cat(features)
    print(f"{len(together)} features, mean {together.mean().item():.10f}")
    return {"weights": model.state_dict(), "features": together}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
