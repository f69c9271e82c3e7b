"""A denoiser: a time and noise drawn for every sample of a batch, then sampling step by step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(10, 8)
        self.entry = nn.Linear(2, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor, time: Tensor) -> Any:
        return self.out(F.silu(self.entry(x) + self.times(time)))


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    angle = 6.3 * torch.rand(41)
    loader = DataLoader(TensorDataset(torch.stack([angle.cos(), angle.sin()], 1)), batch_size=8, shuffle=True)
    kept = torch.cumprod(1 - torch.linspace(1e-2, 0.3, 10), 0)
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for (inputs,) in loader:
            time = torch.randint(0, 10, (inputs.shape[0],))
            noise = torch.randn_like(inputs)
            part = kept[time].unsqueeze(1)
            loss = F.mse_loss(model(part.sqrt() * inputs + (1 - part).sqrt() * noise, time), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.10f}")
    x = torch.randn(5, 2)
    with torch.no_grad():
        for step in range(9, 0, -1):
            x = x - (1 - kept[step] / kept[step - 1]) * model(x, torch.full((5,), step)) + 0.1 * torch.randn(5, 2)
    torch.save(x, "drawn.pt")
    return {"weights": model.state_dict(), "drawn": x}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
