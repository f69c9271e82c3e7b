"""Programs that torch.compile makes slow to start: these run with ``pytest -m soak``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def compiled() -> dict[str, Any]:
    """torch.compile of the model and of the loss, with the "eager" backend."""
    x = torch.randn(43, 6)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    fast = torch.compile(model, backend="eager")
    criterion = torch.compile(lambda scores, labels: F.cross_entropy(scores, labels), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(fast(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": model.state_dict(), "final": fast(x).detach()}
