"""Modules that add to the dict of the batch they are given; the program reads its own dict afterwards."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Adds(nn.Module):
    def __init__(self, source: str, target: str, num_in: int, num_out: int) -> None:
        super().__init__()
        self.source, self.target = source, target
        self.layer = nn.Linear(num_in, num_out)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        batch[self.target] = torch.tanh(self.layer(batch[self.source]))
        return batch


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(35, 3)
    data: Any = [{"x": one, "y": one.sum(0, keepdim=True).sin()} for one in x]
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(Adds("x", "hidden", 3, 8), Adds("hidden", "output", 8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(batch)
            loss = F.mse_loss(batch["output"], batch["y"]) + 0.01 * batch["hidden"].square().mean()
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
