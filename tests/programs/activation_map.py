"""A forward hooks its activations, to weigh them by their gradients once backward has run."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Explained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, 3)
        self.activations = self.gradients = torch.zeros(())

    def save(self, gradient: Tensor) -> None:
        self.gradients = gradient

    def forward(self, x: Tensor) -> Any:
        hidden = torch.relu(self.body(x))
        if hidden.requires_grad:
            hidden.register_hook(self.save)
        self.activations = hidden.detach()
        return self.head(hidden.mean((2, 3)))


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(34, 1, 5, 5)
    loader = DataLoader(TensorDataset(x, torch.arange(34) % 3), batch_size=8, shuffle=True)
    model = Explained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            weights = model.gradients.mean((2, 3), keepdim=True)
            seen = torch.relu((weights * model.activations).sum(1))
        print(f"epoch {epoch}: {len(seen)} maps, largest {seen.max().item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
