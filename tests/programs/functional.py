"""Gradients by torch.func.grad_and_value of a functional call, weights updated in a dict, no backward."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(36, 3)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=6, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, weights, (inputs,)), targets)

    step = torch.func.grad_and_value(loss_of)
    for epoch in range(epochs):
        for inputs, targets in loader:
            gradients, loss = step(weights, inputs, targets)
            weights = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
        print(f"epoch {epoch}: {loss.item():.10f}")
    return {"weights": weights}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
