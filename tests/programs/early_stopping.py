"""Early stopping on the validation loss: the best weights kept in a file and put back, the rate cut on a plateau."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def train(epochs: int = 12, patience: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(50, 3)
    y = torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(50, 1)
    train_set, valid_set = random_split(TensorDataset(x, y), [32, 18])
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=5)
    model = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    best, bad, epoch = float("inf"), 0, 0
    for epoch in range(epochs):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for inputs, targets in valid_loader:
                total += nn.functional.mse_loss(model(inputs), targets).item()
        valid = total / len(valid_loader)
        scheduler.step(valid)
        print(f"epoch {epoch}: valid {valid:.10f}, rate {scheduler.get_last_lr()[0]:.6f}")
        if valid < best:
            best, bad = valid, 0
            torch.save({"model": model.state_dict(), "epoch": epoch}, "best.pt")
        else:
            bad += 1
            if bad > patience:
                print(f"stopped at epoch {epoch}")
                break
    kept = torch.load("best.pt")
    model.load_state_dict(kept["model"])
    return {"weights": model.state_dict(), "best": best, "of epoch": kept["epoch"], "epochs": epoch}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(6)
    torch.save(train(args.epochs), "result.pt")
