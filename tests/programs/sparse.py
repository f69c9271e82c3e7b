"""Word vectors with sparse gradients and a bag of words."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    words = torch.randint(0, 50, (37, 4))
    y = (words < 25).sum(1) % 2
    loader = DataLoader(TensorDataset(words, y), batch_size=8, shuffle=True)
    bag = nn.EmbeddingBag(50, 6, mode="mean", sparse=True)
    head = nn.Linear(6, 2)
    optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], lr=0.5)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(head(bag(inputs)), targets).backward()
            optimizer.step()
    with torch.no_grad():
        final = F.cross_entropy(head(bag(words)), y).item()
    print(f"final {final:.10f}")
    return {"bag": bag.state_dict(), "head": head.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
