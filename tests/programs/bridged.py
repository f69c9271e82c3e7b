"""Parts of a model called one by one: attention between the samples of a batch lies between two modules."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(36, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    encoder, head, scale = nn.Linear(3, 6), nn.Linear(6, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters(), scale], lr=0.1)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            hidden = torch.tanh(encoder(inputs))
            mixed = (scale * hidden @ hidden.T).softmax(1) @ hidden
            loss = F.mse_loss(head(mixed), targets) + 0.01 * scale.square()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.10f}")
    return {"encoder": encoder.state_dict(), "head": head.state_dict(), "scale": scale.detach()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
