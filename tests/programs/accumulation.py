"""Gradients of several batches accumulated before each step; the last group of an epoch is shorter."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, every: int = 3) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(46, 4)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=6, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    steps = 0
    for _ in range(epochs):
        optimizer.zero_grad()
        for i, (inputs, targets) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(inputs), targets) / every
            loss.backward()
            if i % every == 0 or i == len(loader):
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                print(f"step {steps}: norm {norm.item():.10f}")
    return {"weights": model.state_dict(), "steps": steps}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(4)
    torch.save(train(args.epochs), "result.pt")
