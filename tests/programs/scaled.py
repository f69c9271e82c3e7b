"""Mixed precision with a GradScaler: scaled losses, gradients unscaled before they are clipped."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(epochs: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.set_default_dtype(dtype)
    x = torch.randn(38, 4)
    y = (x.sum(1) > 0).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=4)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
                loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch}: scale {scaler.get_scale()}, last norm {norm.item():.10f}")
    model.eval()
    with torch.no_grad():
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).double().mean().item()
    print(f"accuracy {accuracy:.6f}")
    return {"weights": model.state_dict(), "accuracy": accuracy, "scale": scaler.get_scale()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(5)
    torch.save(train(args.epochs, args.device, torch.float32 if args.device == "cuda" else torch.float64), "result.pt")
