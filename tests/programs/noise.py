"""Every way to draw random numbers in a forward: dropouts, noise, masks of samples, coins, torch's and Python's."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Noisy(nn.Module):
    def __init__(self, by_weights: bool) -> None:
        super().__init__()
        self.by_weights = by_weights
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.drop(torch.tanh(self.first(x)))
        if not self.training:
            return self.out(torch.tanh(self.second(hidden)))
        hidden = hidden + 0.1 * torch.randn(len(hidden), 8)
        if torch.rand(()).item() < 0.7:  # skip the layer for the whole batch
            kept = torch.rand(len(x), 1) < 0.8
            hidden = hidden + kept * torch.tanh(self.second(hidden))
        hidden = F.alpha_dropout(hidden, 0.1, training=True)
        if self.by_weights:
            hidden = hidden * torch.bernoulli(torch.sigmoid(hidden)) * torch.multinomial(hidden.exp(), 2)[:, :1]
        mask = torch.rand_like(hidden[:, :1]) < 0.9
        scores = self.out(hidden * mask) + torch.distributions.Normal(0.0, 0.1).sample((len(x), 2))
        scores = scores + 0.1 * F.gumbel_softmax(scores, tau=1.0) + 0.01 * random.random()
        return scores + torch.empty_like(scores).uniform_(-0.1, 0.1) + 0.01 * torch.randint(0, 3, (len(x), 1))


def train(epochs: int = 2, by_weights: bool = False) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(43, 4)
    y = (x[:, 0] > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
    model = Noisy(by_weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(f"epoch {epoch}: train {loss.item():.10f}, all {F.cross_entropy(model(x), y).item():.10f}")
    return {"weights": model.state_dict(), "drawn": torch.rand(3), "coin": random.random()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    random.seed(7)
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
