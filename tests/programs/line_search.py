"""LBFGS over the batches of a loader, on request with a line search that compares losses."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(search: str | None = None) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(34, 3)
    y = torch.sin(x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn=search)
    for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        final = nn.functional.mse_loss(model(x), y).item()
    print(f"final {final:.10f}")
    return {"weights": model.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--search")
    args = parser.parse_args()
    torch.manual_seed(2)
    torch.save(train(args.search), "result.pt")
