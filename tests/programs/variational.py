"""A variational autoencoder: a summed loss, noise drawn in forward, ``encode`` and ``decode`` called on their own."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(9, 10)
        self.mean = nn.Linear(10, 2)
        self.log_variance = nn.Linear(10, 2)
        self.up = nn.Linear(2, 10)
        self.out = nn.Linear(10, 9)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.shared(x))
        return self.mean(hidden), self.log_variance(hidden)

    def sample(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        deviation = torch.exp(0.5 * log_variance)
        return mean + deviation * torch.randn_like(deviation)

    def decode(self, code: Tensor) -> Tensor:
        return torch.sigmoid(self.out(F.relu(self.up(code))))

    def forward(self, x: Tensor) -> Any:
        mean, log_variance = self.encode(x.view(-1, 9))
        return self.decode(self.sample(mean, log_variance)), mean, log_variance


def criterion(images: Tensor, x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    likeness = F.binary_cross_entropy(images, x.view(-1, 9), reduction="sum")
    return likeness - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def train(epochs: int = 2, batch_size: int = 10) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.rand(46, 1, 3, 3).round()
    train_loader = DataLoader(TensorDataset(x[:36]), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[36:]), batch_size=batch_size)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    test_loss = 0.0
    for epoch in range(epochs):
        model.train()
        train_loss = 0.0
        for (inputs,) in train_loader:
            optimizer.zero_grad()
            images, mean, log_variance = model(inputs)
            loss = criterion(images, inputs, mean, log_variance)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
        print(f"epoch {epoch}: {train_loss / 36:.10f}")
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for i, (inputs,) in enumerate(test_loader):
                images, mean, log_variance = model(inputs)
                test_loss += criterion(images, inputs, mean, log_variance).item()
                if i == 0:
                    pairs = torch.cat([inputs[:4], images.view(batch_size, 1, 3, 3)[:4]])
                    torch.save(pairs, f"reconstruction_{epoch}.pt")
            test_loss /= 10
            print(f"test loss {test_loss:.10f}")
            torch.save(model.decode(torch.randn(6, 2)).view(6, 1, 3, 3), f"sample_{epoch}.pt")
    return {"weights": model.state_dict(), "test loss": test_loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.save(train(args.epochs), "result.pt")
