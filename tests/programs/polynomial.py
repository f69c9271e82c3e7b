"""Regression that loops until the loss is small: batches made on the spot, no loader and no optimizer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def features(x: Tensor) -> Tensor:
    return torch.cat([x.unsqueeze(1) ** i for i in range(1, 4)], 1)


def train(enough: float = 0.05) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    slope, offset = torch.randn(3, 1), torch.randn(1)
    layer = torch.nn.Linear(3, 1)
    index, value = 0, 1.0
    while value >= enough:
        index += 1
        x = features(torch.rand(32) * 2 - 1)
        layer.zero_grad()
        loss = F.smooth_l1_loss(layer(x), x.mm(slope) + offset)
        value = loss.item()
        loss.backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.3)
    print(f"loss {value:.10f} after {index} batches")
    print("learned " + " ".join(f"{w:+.8f}" for w in layer.weight.view(-1).tolist()) + f" {layer.bias.item():+.8f}")
    return {"weights": layer.state_dict(), "batches": index}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--enough", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.save(train(args.enough), "result.pt")
