"""Writes as it goes: a folder made once, a text log appended to, a CSV, JSON, a state per epoch; reads it all back."""

from __future__ import annotations

import argparse
import csv
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Writer:
    """Appends scalars to an events file, as writers for dashboards do."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder)
        self.file = open(os.path.join(folder, "events.txt"), "w")  # noqa: SIM115

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.file.write(f"{step} {name} {value:.8f}\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(34, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    os.makedirs("out", exist_ok=False)
    writer = Writer("out/run")
    for epoch in range(epochs):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True).sin()).item()
        writer.add_scalar("loss", loss, epoch)
        with open("out/log.txt", "a") as log:
            log.write(f"epoch {epoch}: {loss:.8f}\n")
        with open("out/table.csv", "a", newline="") as table:
            csv.writer(table).writerow([epoch, f"{loss:.8f}"])
        Path(f"out/epoch_{epoch}.json").write_text(json.dumps({"epoch": epoch, "files": sorted(os.listdir("out"))}))
        torch.save(model.state_dict(), f"out/state_{epoch}.pt")
    writer.close()
    os.rename("out/table.csv", "out/final.csv")
    os.remove("out/state_0.pt")
    with open("out/log.txt") as log:
        lines = log.readlines()
    print(f"{len(lines)} lines, {sorted(os.listdir('out'))}")
    return {"weights": model.state_dict(), "lines": len(lines)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
