"""An image is optimised until a frozen network sees in it what it should: the leaf is no parameter, and no loader."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def train(epochs: int = 4) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval().requires_grad_(False)
    content = network(torch.randn(1, 1, 9, 9)).detach()
    image = torch.randn(1, 1, 9, 9).requires_grad_(True)
    optimizer = torch.optim.SGD([image], lr=2.0, momentum=0.5)
    for epoch in range(epochs):
        optimizer.zero_grad()
        features = network(image)
        loss = F.mse_loss(features, content) + 1e-2 * image.diff(dim=3).pow(2).sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            image.clamp_(-1.5, 1.5)
        print(f"epoch {epoch}: {loss.item():.10f}")
    torch.save(image, "image.pt")
    return {"image": image.detach()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
