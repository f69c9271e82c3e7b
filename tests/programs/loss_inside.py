"""A model that takes the labels too, and gives its loss along with the scores in a dict."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.head(torch.tanh(self.body(inputs)))
        output = {"scores": scores}
        if labels is not None:
            output["loss"] = F.cross_entropy(scores, labels)
        return output


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(45, 4)
    y = x[:, :3].argmax(1)
    data: Any = [{"inputs": one, "labels": label} for one, label in zip(x, y, strict=True)]
    train_loader = DataLoader(data[:31], batch_size=8, shuffle=True)
    test_loader = DataLoader(data[31:], batch_size=5)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in train_loader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            total += loss.item()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [model(**batch)["loss"].item() for batch in test_loader]
        print(f"epoch {epoch}: train {total / len(train_loader):.10f}, test {sum(losses) / len(losses):.10f}")
    return {"weights": model.state_dict(), "test": losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
