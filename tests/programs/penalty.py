"""A critic with a penalty on its gradient by the inputs, by autograd.grad with the graph kept."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(40, 3)
    y = (x[:, 0] > x[:, 1]).double().unsqueeze(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
    critic = nn.Sequential(nn.Linear(3, 10), nn.Softplus(), nn.Linear(10, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, targets in loader:
            inputs = inputs.clone().requires_grad_(True)
            scores = critic(inputs)
            (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
            loss = F.binary_cross_entropy_with_logits(scores, targets) + 0.5 * (slope.norm(2, dim=1) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        final = F.binary_cross_entropy_with_logits(critic(x), y).item()
    print(f"final {final:.10f}")
    return {"weights": critic.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
