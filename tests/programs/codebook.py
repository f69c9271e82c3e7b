"""Vector quantisation: a codebook in buffers follows the batches by moving averages that forward updates."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Quantiser(nn.Module):
    codes: Tensor
    counts: Tensor

    def __init__(self, num_codes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(num_codes, width))
        self.register_buffer("counts", torch.ones(num_codes))

    def forward(self, x: Tensor) -> Any:
        nearest = F.one_hot(torch.cdist(x, self.codes).argmin(1), len(self.codes)).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.8).add_(nearest.sum(0), alpha=0.2)
                self.codes.mul_(0.8).add_(nearest.T @ x / (1e-2 + self.counts.unsqueeze(1)), alpha=0.2)
        chosen = nearest @ self.codes
        return x + (chosen - x).detach()


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(36, 5)
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 3), Quantiser(4, 3), nn.Linear(3, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        model.train()
        for (inputs,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        final = F.mse_loss(model(x), x).item()
    print(f"final {final:.10f}")
    return {"weights": model.state_dict(), "final": final}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
