"""Train an embedding with ``max_norm``: each lookup renormalises the rows that it reads, in place."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    words = torch.randint(0, 12, (36, 3))
    y = (words < 6).sum(1) % 2
    loader = DataLoader(TensorDataset(words, y), batch_size=6, shuffle=True)
    model = nn.Sequential(nn.Embedding(12, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    with torch.no_grad():
        final = F.cross_entropy(model(words), y).item()
    print(f"final {final:.10f}")
    return {"weights": model.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
