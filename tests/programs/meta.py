"""Learning to learn: an inner step by autograd.grad with its graph kept, then a backward through it; no loader."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def task() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    amplitude, phase = 0.5 + torch.rand(()), 3 * torch.rand(())
    x = 6 * torch.rand(20, 1) - 3
    y = amplitude * torch.sin(x + phase)
    return x[:10], y[:10], x[10:], y[10:]


def train(epochs: int = 4, rate: float = 0.1) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(3):
            x, y, new_x, new_y = task()
            weights: dict[str, Tensor] = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
                gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                pairs = zip(weights.items(), gradients, strict=True)
                weights = {name: weight - rate * gradient for (name, weight), gradient in pairs}
            total = total + F.mse_loss(torch.func.functional_call(model, weights, (new_x,)), new_y)
        total.backward()
        optimizer.step()
        print(f"epoch {epoch}: {total.item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
