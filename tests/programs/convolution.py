"""A convolutional network whose layers are appended in a loop, with BatchNorm and an uneven last batch."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class ConvNet(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for num_in, num_out in zip([1, *widths], widths, strict=False):
            self.convolutions.append(nn.Conv2d(num_in, num_out, 3, padding=1))
            self.norms.append(nn.BatchNorm2d(num_out))
        self.out = nn.Linear(widths[-1], 3)

    def forward(self, x: Tensor) -> Any:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.out(x.mean((2, 3)))


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(45, 1, 8, 8)
    y = torch.arange(45) % 3
    x[:, 0, 0] += y.unsqueeze(1)
    train_loader: Any = DataLoader(TensorDataset(x[:29], y[:29]), batch_size=8, shuffle=True)
    test_loader: Any = DataLoader(TensorDataset(x[29:], y[29:]), batch_size=10)
    model = ConvNet([4, 6])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=epochs, steps_per_epoch=len(train_loader))
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        losses, correct = list[float](), 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                outputs = model(inputs)
                losses.append(F.cross_entropy(outputs, targets).item())
                correct += int((outputs.argmax(1) == targets).sum())
        accuracy = correct / len(test_loader.dataset)
        print(f"epoch {epoch}: test {sum(losses) / len(losses):.10f}, accuracy {accuracy:.4f}")
    return {"weights": model.state_dict(), "accuracy": accuracy}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
