"""Mixup: samples of a batch are blended with others of the same batch, in a proportion drawn with numpy."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, alpha: float = 0.4) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(40, 5)
    y = x[:, :3].argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        total, correct = 0.0, 0.0
        for inputs, targets in loader:
            part = np.random.beta(alpha, alpha)
            partner = torch.randperm(inputs.size(0))
            outputs = model(part * inputs + (1 - part) * inputs[partner])
            loss = part * F.cross_entropy(outputs, targets) + (1 - part) * F.cross_entropy(outputs, targets[partner])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * inputs.size(0)
            predicted = outputs.argmax(1)
            correct += part * (predicted == targets).sum().item()
            correct += (1 - part) * (predicted == targets[partner]).sum().item()
        print(f"epoch {epoch}: loss {total / 40:.10f}, accuracy {correct / 40:.10f}")
    return {"weights": model.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    np.random.seed(7)
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
