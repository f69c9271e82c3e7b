"""The program of the article; in a file that a rank imports without pytest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Field(torch.nn.Module):
    """The article's kind of network: three layers, and outputs of shape (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(*size) for size in ((2, 100), (100, 100), (100, 1)))

    def forward(self, points: torch.Tensor) -> Any:
        """Values at ``points`` (B, 2), of shape (B, 1)."""
        return self.last(torch.relu(self.second(torch.relu(self.first(points)))))


def train_field(module: Any, hparams: Mapping[str, Any], train_set: Any, test_set: Any) -> Any:
    """Loaders and optimizer made inside, evaluation by ``eval()`` alone, and a tensor returned, as in the article."""
    import torch

    model = module()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    criterion = torch.nn.MSELoss()
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=64)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=64)

    def evaluate() -> Any:
        loss = 0
        model.eval()
        for points, values in test_loader:
            loss += criterion(model(points).detach().squeeze(1), values)
        return loss

    for _ in range(2):
        model.train()
        for points, values in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(points).squeeze(1), values)
            loss.backward()
            optimizer.step()
    return evaluate()
