"""A recurrent model that keeps its hidden state on itself; the program begins it anew for each batch."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 6)
        self.out = nn.Linear(6, 1)
        self.hidden = torch.zeros(0, 6)

    def begin(self, batch_size: int) -> None:
        self.hidden = torch.zeros(batch_size, 6)

    def forward(self, x: Tensor) -> Any:
        self.hidden = self.cell(x, self.hidden)
        return self.out(self.hidden)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(33, 4, 2)
    loader = DataLoader(TensorDataset(x, x.sum((1, 2)).unsqueeze(1)), batch_size=6, shuffle=True)
    model = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for inputs, targets in loader:
            model.begin(len(inputs))
            optimizer.zero_grad()
            for i in range(inputs.size(1)):
                output = model(inputs[:, i])
            loss = F.mse_loss(output, targets)
            loss.backward()
            optimizer.step()
        size = model.hidden.square().mean().item()
        print(f"epoch {epoch}: {loss.item():.10f}, hidden {size:.10f} of {len(model.hidden)}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
