"""A classifier whose loss is a sum over the batch, averaged by hand over ``len(dataset)`` at the end of an epoch."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, width)
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.tanh(self.hidden(x)))


def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def train(epochs: int = 2, batch_size: int = 8, lr: float = 0.01) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(52, 6)
    y = (x[:, :4] + 0.1 * torch.randn(52, 4)).argmax(1)
    train_loader: Any = DataLoader(TensorDataset(x[:36], y[:36]), batch_size=batch_size, shuffle=True)
    test_loader: Any = DataLoader(TensorDataset(x[36:], y[36:]), batch_size=batch_size)
    model = Net(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loss_of_test, accuracy = 0.0, 0.0
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            total += loss.item()
            optimizer.step()
        print(f"epoch {epoch}: average loss {total / len(train_loader.dataset):.12f}")
        model.eval()
        loss_of_test, correct = 0.0, 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                outputs = model(inputs)
                loss_of_test += criterion(outputs, targets).item()
                grid = outputs.view(batch_size, 2, 2)
                correct += int((grid.flatten(1).argmax(1) == targets).sum())
        loss_of_test /= len(test_loader.dataset)
        accuracy = 100.0 * correct / len(test_loader.dataset)
        print(f"test: average loss {loss_of_test:.12f}, accuracy {correct} ({accuracy:.2f}%)")
    return {"weights": model.state_dict(), "test loss": loss_of_test, "accuracy": accuracy}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.save(train(args.epochs, lr=args.lr), "result.pt")
