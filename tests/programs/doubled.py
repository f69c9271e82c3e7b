"""The norm of the gradient by the parameters is part of the loss: autograd.grad with its graph, then backward."""

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
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=6, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            (loss + 0.1 * norm).backward()
            optimizer.step()
        print(f"epoch {epoch}: norm {norm.item():.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
