"""Training by a number of steps: batches drawn with next, the loader begun again whenever it runs out."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(29, 3)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    example, _ = next(iter(loader))
    print(f"features {example.shape[1]}, rows a batch at most {loader.batch_size}")
    batches = iter(loader)
    for step in range(5 * epochs):
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        if step % 5 == 4:
            with torch.no_grad():
                print(f"step {step}: {F.mse_loss(model(x), x.sin().sum(1, keepdim=True)).item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
