"""A siamese network on pairs that the data set draws with ``random`` when it is asked for a sample."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __init__(self, count: int) -> None:
        self.labels = torch.arange(count) % 3
        self.points = torch.randn(count, 4) + self.labels.unsqueeze(1)
        self.groups = [(self.labels == label).nonzero().flatten().tolist() for label in range(3)]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        label = int(self.labels[index])
        same = index % 2 == 0
        if not same:
            label = random.choice([other for other in range(3) if other != label])
        partner = random.choice(self.groups[label])
        return self.points[index], self.points[partner], torch.tensor(float(same))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(8, 1)
        self.body.apply(self.init)

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            module.bias.data.fill_(0.01)

    def forward_once(self, x: Tensor) -> Any:
        return self.body(x)

    def forward(self, first: Tensor, second: Tensor) -> Any:
        both = torch.cat((self.forward_once(first), self.forward_once(second)), 1)
        return torch.sigmoid(self.head(both))


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    train_loader: Any = DataLoader(Pairs(30), batch_size=8, shuffle=True)
    test_loader: Any = DataLoader(Pairs(12), batch_size=6)
    model = Siamese()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCELoss()
    test_loss = 0.0
    for epoch in range(epochs):
        model.train()
        for i, (first, second, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = criterion(model(first, second).squeeze(), target)
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} batch {i} of {len(train_loader)}: loss {loss.item():.10f}")
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for first, second, target in test_loader:
                test_loss += nn.functional.binary_cross_entropy(
                    model(first, second).squeeze(), target, reduction="sum"
                ).item()
        test_loss /= len(test_loader.dataset)
        print(f"test loss {test_loss:.10f}")
        scheduler.step()
    return {"weights": model.state_dict(), "test loss": test_loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)
    torch.save(train(args.epochs), "result.pt")
