"""Activations recomputed in backward, both ways torch has, on request with dropout in what is recomputed."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, dropout: float = 0.0) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(38, 4)
    y = x.sum(1, keepdim=True).cos()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
    entry, out = nn.Linear(4, 6), nn.Linear(6, 1)
    model = nn.ModuleList([entry, blocks, out])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            hidden = entry(inputs)
            for block, reentrant in zip(blocks, (True, False), strict=True):
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            loss = F.mse_loss(out(hidden), targets)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
