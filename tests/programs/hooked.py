"""Features of an inner layer, caught by a forward hook, enter the loss; another hook watches gradients."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(43, 4)
    y = x[:, :2].argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 2))
    caught: dict[str, Tensor] = {}

    def catch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        caught["features"] = output

    handle = model[1].register_forward_hook(catch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            penalty = caught["features"].pow(2).mean()
            loss = F.cross_entropy(outputs, targets) + 0.3 * penalty
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.10f}, penalty {penalty.item():.10f}, rows {len(caught['features'])}")
    handle.remove()
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
