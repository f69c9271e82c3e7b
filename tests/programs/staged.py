"""A model whose forward takes another way once the program has set its stage, one that couples the samples."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.centred = False

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        if self.centred:
            hidden = hidden - hidden.mean(0)
        return self.head(hidden)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(36, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=6, shuffle=True)
    model = Staged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        model.centred = epoch > 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
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
