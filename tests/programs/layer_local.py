"""Layers that train themselves, each with its own optimizer and loss; no gradient crosses a layer."""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Layer(nn.Linear):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.5)
        self.threshold = 1.0

    def forward(self, x: Tensor) -> Any:
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

    def fit(self, good: Tensor, bad: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        for step in range(steps):
            of_good = self.forward(good).pow(2).mean(1)
            of_bad = self.forward(bad).pow(2).mean(1)
            margins = torch.cat([-of_good + self.threshold, of_bad - self.threshold])
            loss = torch.log(1 + torch.exp(margins)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step == 0:
                print(f"layer {self.in_features}-{self.out_features}: loss {loss.item():.10f}")
        return self.forward(good).detach(), self.forward(bad).detach()


class Net(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = [Layer(*pair) for pair in pairwise(sizes)]

    def predict(self, x: Tensor) -> Tensor:
        scores = []
        for label in range(3):
            hidden, score = written(x, torch.full((len(x),), label)), torch.zeros(len(x))
            for layer in self.layers:
                hidden = layer(hidden)
                score = score + hidden.pow(2).mean(1)
            scores.append(score)
        return torch.stack(scores, 1).argmax(1)

    def fit(self, good: Tensor, bad: Tensor, steps: int) -> None:
        for layer in self.layers:
            good, bad = layer.fit(good, bad, steps)


def written(x: Tensor, label: Tensor) -> Tensor:
    """The points with their label written into the first places."""
    x = x.clone()
    x[:, :3] = 0.0
    x[range(len(x)), label] = x.max()
    return x


def train(epochs: int = 1, steps: int = 4) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    y = torch.arange(42) % 3
    x = torch.cat([torch.ones(42, 3), torch.rand(42, 5) + y.unsqueeze(1) * torch.rand(1, 5)], 1)
    x = x / x.max()
    loader = DataLoader(TensorDataset(written(x, y), written(x, (y + 1) % 3)), batch_size=16, shuffle=True)
    net = Net([8, 10, 6])
    for _ in range(epochs):
        for good, bad in loader:
            net.fit(good, bad, steps)
    error = 1.0 - net.predict(x).eq(y).double().mean().item()
    print(f"error {error:.10f}")
    return {"weights": [layer.state_dict() for layer in net.layers], "error": error}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.save(train(args.epochs), "result.pt")
