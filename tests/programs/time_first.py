"""Sequences laid out [time, batch, feature] by the loader's collate_fn, for a recurrent network."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples], dim=1), torch.stack([y for _, y in samples])


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.rnn(x)[0][-1])


class Each(nn.Module):
    """A module with time as the first dimension of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.rnn(x)[0])


def train(epochs: int = 2, num_times: int = 6) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(33, num_times, 2)
    loader = DataLoader(TensorDataset(x, x.sum((1, 2)).unsqueeze(1)), batch_size=6, shuffle=True, collate_fn=collate)
    last, each = Last(), Each()
    optimizer = torch.optim.SGD([*last.parameters(), *each.parameters()], lr=0.05)
    for epoch in range(epochs):
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            running = inputs.cumsum(0).sum(2, keepdim=True)
            loss = F.mse_loss(last(inputs), targets) + F.mse_loss(each(inputs), running)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.10f}")
    return {"last": last.state_dict(), "each": each.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
