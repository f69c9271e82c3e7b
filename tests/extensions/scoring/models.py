"""Models that the tests of scoring train, and a table that they score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import nn

NUM_PLANS = 10


class Churn(nn.Module):
    """A category and two numbers to one number; row by row, and by a function of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Embedding(NUM_PLANS, 4)
        self.dropout = nn.Dropout(0.5)
        self.net = nn.Linear(6, 1)

    def forward(self, plan: Any, usage: Any, age: Any) -> Any:
        return self.net(self.dropout(joined(self.plan(plan), usage, age)))


class Tuned(nn.Module):
    """A module that needs to know how it was made."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.net = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.net(x) * self.heads


def joined(plan: Any, usage: Any, age: Any) -> Any:
    """The inputs side by side."""
    return torch.cat([plan, torch.stack([usage, age], 1)], 1)


def churn(seed: int = 0) -> Churn:
    """A model with random weights, in training mode."""
    torch.manual_seed(seed)
    return Churn().train()


def table(num_rows: int = 50) -> pd.DataFrame:
    """Rows for ``Churn``, with a key and texts."""
    random = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "customer": np.arange(num_rows) + 1000,
            "plan": random.integers(0, NUM_PLANS, num_rows),
            "usage": random.random(num_rows),
            "age": random.random(num_rows),
            "text": [f"text {number}" for number in range(num_rows)],
        }
    )


def scores(model: Churn, rows: pd.DataFrame) -> Any:
    """What a loop by hand gives for the rows."""
    model = model.eval()
    with torch.no_grad():
        columns = [torch.from_numpy(rows[name].to_numpy()) for name in ("plan", "usage", "age")]
        found: Any = model(columns[0], columns[1].float(), columns[2].float())[:, 0].numpy()
    model.train()
    return found
