"""A body trained before, frozen but for its norm layers' statistics, gets a new head; then all of it is trained."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def fit(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def train(epochs: int = 1) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(37, 5)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    torch.save(body.state_dict(), "body.pt")
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    model.load_state_dict(torch.load("body.pt", weights_only=True))
    for parameter in model.parameters():
        parameter.requires_grad = False
    model[3] = nn.Linear(8, 3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(epochs):
        fit(model, loader, torch.optim.SGD(trained, lr=0.2))
    model.requires_grad_(True)
    groups: list[Any] = [{"params": model[:3].parameters(), "lr": 0.01}, {"params": model[3].parameters()}]
    for _ in range(epochs):
        fit(model, loader, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    model.eval()
    with torch.no_grad():
        final = F.cross_entropy(model(x), x[:, :3].argmax(1)).item()
    print(f"final {final:.10f}")
    return {"weights": model.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
