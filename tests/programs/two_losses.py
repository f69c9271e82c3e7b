"""Two heads on one body, a loss and a backward for each before one step; an optimizer for each part."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 10)
        self.value = nn.Linear(10, 1)
        self.kind = nn.Linear(10, 3)
        self.unused = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self.value(hidden), self.kind(hidden)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(37, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True), x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    model = TwoHeads()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.value, model.kind)]
    for epoch in range(epochs):
        norm = torch.zeros(())
        for inputs, values, kinds in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            value, kind = model(inputs)
            F.mse_loss(value, values).backward(retain_graph=True)
            assert model.body.weight.grad is not None
            norm = model.body.weight.grad.norm()
            F.cross_entropy(kind, kinds).backward()
            for optimizer in optimizers:
                optimizer.step()
        print(f"epoch {epoch}: norm of the first loss's gradient {norm.item():.10f}")
    assert model.unused.weight.grad is None
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
