"""Differentially private training: per-sample gradients by torch.func, clipped one by one, put into .grad."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, bound: float = 0.5) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(36, 3)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=6, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def loss_of_one(weights: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        output = torch.func.functional_call(model, weights, (one.unsqueeze(0),))
        return F.mse_loss(output, target.unsqueeze(0))

    per_sample = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))
    for epoch in range(epochs):
        for inputs, targets in loader:
            weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
            gradients = per_sample(weights, inputs, targets)
            norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients.values()]).norm(dim=0)
            scale = (bound / norms).clamp(max=1.0)
            for name, parameter in model.named_parameters():
                clipped = torch.einsum("b,b...->...", scale, gradients[name])
                parameter.grad = (clipped + 0.01 * torch.randn_like(parameter)) / len(inputs)
            optimizer.step()
        print(f"epoch {epoch}: largest norm {norms.max().item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
