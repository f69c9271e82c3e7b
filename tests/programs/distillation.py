"""A small student learns from a frozen teacher and from the labels."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, temperature: float = 2.0) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(44, 5)
    y = (x[:, :3] ** 2).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    teacher = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 3)).eval()
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    student = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    for _ in range(epochs):
        student.train()
        for inputs, targets in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(inputs) / temperature, dim=1)
            outputs = student(inputs)
            likeness = F.kl_div(F.log_softmax(outputs / temperature, dim=1), soft, reduction="batchmean")
            loss = 0.7 * temperature**2 * likeness + 0.3 * F.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    student.eval()
    with torch.no_grad():
        agreement = (student(x).argmax(1) == teacher(x).argmax(1)).double().mean().item()
    print(f"agreement {agreement:.10f}")
    return {"student": student.state_dict(), "teacher": teacher.state_dict(), "agreement": agreement}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
