"""Trains, saves a checkpoint each epoch, and starts again from the one it finds; the second half with new objects."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def fit(until: int) -> nn.Module:
    model, optimizer, scheduler = build()
    data = torch.load("data.pt")
    loader = DataLoader(TensorDataset(*data), batch_size=8, shuffle=True)
    first = 0
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        first = state["epoch"] + 1
        print(f"resumed at epoch {first}")
    for epoch in range(first, until):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        scheduler.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "epoch": epoch, "random": torch.get_rng_state()}, "checkpoint.pt")
        print(f"epoch {epoch} saved")
    return model


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(35, 3)
    if not os.path.exists("data.pt"):
        torch.save((x, x.prod(1, keepdim=True)), "data.pt")
    fit(1)
    return {"weights": fit(epochs).state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
